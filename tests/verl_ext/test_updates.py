"""The update without zero-advantage responses is the update with them, and watching it changes nothing; what is read there is
what a plain computation says, over losses, aggregations, layouts, ranks and epochs."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence

from grail_advantage.receipt import Receipt
from grail_advantage.verl_ext.dump import loss_of
from grail_advantage.verl_ext.exchange import trains
from grail_advantage.verl_ext.rules import SKIPPABLE
from grail_advantage.verl_ext.settings import ACTOR, Settings
from grail_advantage.verl_ext.worker import OptimiserStep
from tests.composed import verls_on_cpu
from tests.core.tiny_models import tiny_model
from tests.verl_ext import ranks
from tests.verl_ext.one_step import receipt_by
from tests.verl_ext.ranks import (
    PLAIN_UPDATE,
    TEMPERATURE,
    TOKEN_MEAN,
    UPDATES,
    Results,
    start_ranks,
)

pytestmark = pytest.mark.slow

MINI_BATCHES = (
    # On two ranks: only the first has responses that train. Of them one keeps a token of ten, one nothing but a masked token.
    [(5, 9, 9), (3, 12, 0), (6, 14, 3), (4, 8, 0), (3, 15, 0), (7, 6, 0), (2, 11, 0), (5, 5, 0)],
    [(4, 10, 0), (6, 7, 0), (3, 12, 0), (8, 4, 0), (5, 8, 0), (2, 13, 0), (6, 6, 0), (4, 9, 0)],
    [(3, 7, 0), (6, 11, 6), (4, 13, 0), (5, 5, 0), (4, 12, 12), (7, 9, 2), (3, 16, 16), (2, 8, 1)],
)
"""Each response's tokens of prompt and response, and those up to the last one with an advantage."""
NOT_WRITTEN = 3
"""Place of a response that the token dump does not write."""
PACKED = next(iter(UPDATES))
Row = dict[str, Any]


def _log_probs(model: torch.nn.Module, row: Row) -> torch.Tensor:
    tokens = torch.cat([row["prompt"], row["response"]])
    start = len(row["prompt"])
    log_probs_PV = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return log_probs_PV[start - 1 : -1].gather(1, row["response"][:, None])[:, 0]


@cache
def plan() -> list[list[Row]]:
    """The responses of each mini-batch; old log-probabilities are the policy's, with noise that takes some ratios out of
    their bounds."""
    generator = torch.Generator().manual_seed(0)
    model = tiny_model(layers=2)

    def draw(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator)

    def row_of(prompt: int, response: int, trained: int) -> Row:
        ids = torch.randint(0, 90, (prompt + response,), generator=generator)
        row: Row = {"prompt": ids[:prompt], "response": ids[prompt:]}
        row["advantages"] = torch.where(torch.arange(response) < trained, draw(response), 0.0)
        row["mask"] = torch.ones(response, dtype=torch.int64)
        if response > 8:
            row["mask"][4] = 0  # of a tool
            row["advantages"][4] = 0 if trained > 4 else 1.0
        row["weights"] = 0.5 + draw(response).abs()
        row["noise"] = 0.3 * draw(response)
        row["old_log_probs"] = _log_probs(model, row).detach() + row["noise"]
        return row

    mini_batches = [[row_of(*row) for row in mini_batch] for mini_batch in MINI_BATCHES]
    for place, row in enumerate(row for mini_batch in mini_batches for row in mini_batch):
        row["place"] = place
        row["written"] = -1 if place == NOT_WRITTEN else place - (place > NOT_WRITTEN)
    return mini_batches


def rows() -> list[Row]:
    return [row for mini_batch in plan() for row in mini_batch]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """All updates, on two ranks."""
    folder = tmp_path_factory.mktemp("updates")
    tiny_model(layers=2).save_pretrained(folder / "qwen3")
    torch.manual_seed(0)
    adapted = get_peft_model(
        tiny_model(layers=2), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    )
    adapted.save_pretrained(folder / "adapter")
    torch.save(plan(), folder / "plan.pt")
    return start_ranks("updates", folder, 2)


def _assert_close(
    actual: list[torch.Tensor], expected: list[torch.Tensor], rtol: float = 1e-4
) -> None:
    largest = max(float(values.detach().abs().max()) for values in expected if values.numel())
    for of_one, of_other in zip(actual, expected, strict=True):
        torch.testing.assert_close(of_one, of_other, rtol=0, atol=rtol * max(largest, 1e-5))


@pytest.mark.parametrize("setup", UPDATES)
def test_without_zero_advantage_responses_it_is_the_same_update(
    setup: str, results: list[Results]
) -> None:
    """With each of verl's losses that leave responses out."""
    trained = [True, False, True] * ranks.EPOCHS
    assert set(ranks.LOSSES) == set(SKIPPABLE)
    for result in [result["updates"][setup] for result in results]:
        for of_loss in UPDATES[setup][2]:
            verl = result[(*of_loss, "verl")]
            skipped = result[(*of_loss, "skipped")]
            for number, (actual, expected) in enumerate(
                zip(skipped["gradients"], verl["gradients"], strict=True)
            ):
                _assert_close(actual, expected)
                assert trained[number] or all((values == 0).all() for values in actual)
            _assert_close(skipped["parameters"], verl["parameters"])
            assert skipped["positions"] < 0.75 * verl["positions"]
            actual = skipped["metrics"]
            expected = verl["metrics"]
            assert actual.keys() == expected.keys()
            if actual:  # verl collects them from one rank of those with the same responses
                for name in ("grad_norm", "loss"):
                    assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (
                        of_loss
                    )
                assert [norm > 0 for norm in expected["grad_norm"]] == trained
                assert actual.get("actor/ppo_kl", [0, 0])[1] == 0  # of no response


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "gpg"])
def test_a_token_trains_with_its_own_advantage(loss: str, results: list[Results]) -> None:
    """By the loss's definition, token by token: also in losses whose ratio is the response's, or takes no part in the
    gradient, a token's weight multiplies its gradient."""
    model = tiny_model(layers=2)
    count = sum(int(row["mask"].sum()) for row in plan()[0])
    total = torch.zeros(())
    for row in plan()[0]:
        own_T = _log_probs(model, row)
        for t in row["mask"].nonzero().flatten().tolist():
            total = total - _slope(loss, row, t, own_T.detach()) * own_T[t] / count
    total.backward()
    expected = [p.grad for p in model.parameters()]
    for mode in ("verl", "skipped"):
        of_ranks = [result["updates"][PACKED] for result in results]
        shards = zip(
            *(result[loss, TOKEN_MEAN, mode]["gradients"][0] for result in of_ranks), strict=True
        )
        _assert_close([torch.cat(parts) for parts in shards], expected, 1e-3)


def _slope(loss: str, row: Row, t: int, log_probs_T: torch.Tensor) -> float:
    """The effective advantage."""
    trained = row["mask"].nonzero().flatten().tolist()
    advantage = float(row["advantages"][t])
    weight = float(row["weights"][t])
    moved = log_probs_T - row["old_log_probs"]
    ratio = math.exp(float(moved[t]))
    if loss == "gspo":
        ratio = math.exp(sum(float(moved[u]) for u in trained) / len(trained))
    if loss in ("vanilla", "gspo"):
        outside = ratio > 1.2 if advantage > 0 else ratio < 0.8 or (loss == "vanilla" and ratio > 3)
        return 0.0 if outside else advantage * ratio * weight
    return advantage * weight * (min(max(ratio, 0.8), 1.2) if loss == "cispo" else 1.0)


@pytest.mark.parametrize("setup", UPDATES)
def test_watching_changes_nothing_bit_for_bit(setup: str, results: list[Results]) -> None:
    for result in [result["updates"][setup] for result in results]:
        for (*of_loss, mode), watched in result.items():
            if "watched" in mode:
                plain = result[(*of_loss, "skipped" if "skipped" in mode else "verl")]
                assert all(map(torch.equal, watched["parameters"], plain["parameters"]))
                names = [name for name in plain["metrics"] if "perf" not in name and name != "mfu"]
                assert all(watched["metrics"][name] == plain["metrics"][name] for name in names)


def _steps(results: list[Results], setup: str, *update: str) -> list[list[OptimiserStep]]:
    """Of the data-parallel ranks."""
    return [
        steps
        for result in results
        if (steps := result["updates"][setup][update]["steps"]) is not None
    ]


def _receipt(
    of_ranks: list[list[OptimiserStep]], loss: str, aggregation: str, mode: str
) -> Receipt:
    """The trainer's receipt of these steps."""

    def padded(name: str) -> torch.Tensor:
        return pad_sequence([row[name] for row in rows()], batch_first=True)

    options = {
        "ppo_epochs": ranks.EPOCHS,
        "loss_scale_factor": ranks.SCALE,
        "loss_agg_mode": aggregation,
    }
    options["policy_loss.loss_mode"] = loss
    config = verls_on_cpu(*(f"{ACTOR}.{name}={value}" for name, value in options.items()))
    mask_BT = padded("mask").bool()
    chosen = [row["place"] for row in rows() if row["written"] >= 0]
    columns = {"old_log_probs": padded("old_log_probs"), "rollout_is_weights": padded("weights")}
    sent = [is_sent or "skipped" not in mode for is_sent in _trained()]
    how = {
        "sent": sent,
        "loss": loss_of(Settings.parse(config)),
        "epochs": ranks.EPOCHS,
        "on_policy": False,
    }
    return receipt_by(of_ranks, mask_BT, padded("advantages"), columns, chosen, **how)


def _trained() -> list[bool]:
    return trains([row["advantages"] for row in rows()], [row["mask"] for row in rows()])


@pytest.mark.parametrize("setup", UPDATES)
def test_no_false_alarm_and_every_token_receives_what_was_intended(
    setup: str, results: list[Results]
) -> None:
    written = [row for row in rows() if row["written"] >= 0]
    trained = _trained()
    clipped = 0
    for of_loss in UPDATES[setup][2]:
        for mode in ["watched"] + ["skipped, watched"] * (of_loss == PLAIN_UPDATE):
            receipt = _receipt(_steps(results, setup, *of_loss, mode), *of_loss, mode)
            case = (setup, *of_loss, mode)
            assert not receipt.findings, (case, *map(str, receipt.findings))
            clipped += int((receipt.clipped_BT > 0).sum())
            held_UBT = receipt.received_UBT.isfinite()
            for b, row in enumerate(written):
                number = row["place"] // len(MINI_BATCHES[0])
                sent = mode == "watched" or trained[row["place"]]
                updates = held_UBT[:, b].any(dim=1).nonzero().flatten().tolist()
                assert updates == ([number, number + len(plan())] if sent else []), case
            received = receipt.received_UBT[held_UBT]
            expected = receipt.expected_UBT[held_UBT]
            torch.testing.assert_close(received, expected, rtol=1e-3, atol=1e-5)
            assert (
                len(receipt.received_UBT) == ranks.EPOCHS * len(plan())
                and received.abs().max() > 0.1
            )
    assert clipped > 4


@pytest.mark.parametrize("setup", UPDATES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_updates_own_forward_gives_the_old_log_probabilities(
    setup: str, epochs: int, results: list[Results]
) -> None:
    """The update is the one with verl's forward before it, with and without zero-advantage responses; its columns are those
    of that forward."""
    for result in [result["own_forward"][setup] for result in results]:
        verl = result[epochs, "verl"]
        for mode in ("reused", "reused, skipped, watched"):
            reused = result[epochs, mode]
            for gradients, expected in zip(reused["gradients"], verl["gradients"], strict=True):
                _assert_close(gradients, expected)
            _assert_close(reused["parameters"], verl["parameters"])
            if reused["metrics"]:
                ratios = reused["metrics"]["actor/ppo_kl"]
                assert len(ratios) >= epochs and ratios[0] == 0 and (epochs == 1 or any(ratios))
                assert "actor/entropy_loss" not in reused["metrics"]
            for name, of_responses in reused["own_forward"].items():
                for place, values_T in of_responses.items():
                    expected_T = result["columns"][name][result["expected"][place]]
                    torch.testing.assert_close(values_T, expected_T, rtol=1e-4, atol=1e-5)
            trained = {place for place in result["expected"] if _trained()[place]}
            every_place = {"reused": set(result["expected"])}
            assert all(
                columns.keys() == every_place.get(mode, trained)
                for columns in reused["own_forward"].values()
            )
