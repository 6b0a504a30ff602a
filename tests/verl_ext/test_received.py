"""What an update's tokens receive, read in verl's engines: the update stays the same bit for bit, and the figures are those of
a plain computation, over losses, aggregations, layouts, ranks, epochs and skipping."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from grail_advantage.receipt import Receipt
from grail_advantage.verl_ext.received import OptimiserStep, UpdateReader, Written, loss_of, receipt_of
from grail_advantage.verl_ext.settings import Settings
from grail_advantage.verl_ext.zero_advantage import trains
from tests.composed import verls_on_cpu
from tests.core.tiny_models import tiny_model
from tests.verl_ext import received_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks

LENGTHS = (
    # Tokens of prompt and response, and those up to the last one with an advantage.
    [(5, 9, 9), (3, 12, 0), (6, 14, 3), (4, 8, 8)],
    [(3, 7, 7), (6, 11, 0), (4, 13, 13), (5, 5, 0)],
)
TEMPERATURE = 0.8


def _plan() -> list[list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)
    model = tiny_model(layers=2)

    def draw(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator)

    mini_batches, written = [], 0
    for number, lengths in enumerate(LENGTHS):
        mini_batch = []
        for place, (prompt, response, trained) in enumerate(lengths):
            row: dict[str, Any] = {
                name: torch.randint(0, 90, (n,), generator=generator)
                for name, n in (("prompt", prompt), ("response", response))
            }
            row["mask"] = torch.ones(response, dtype=torch.int64)
            row["advantages"] = torch.where(torch.arange(response) < trained, draw(response), 0.0)
            if response > 8:
                row["mask"][4], row["advantages"][4] = 0, 0.0
            row["weights"] = 0.5 + draw(response).abs()
            row["old_log_probs"] = _log_probs(model, row) + 0.3 * draw(response)
            row["written"] = -1
            if (number, place) != (0, 3):  # one response is not written
                row["written"], written = written, written + 1
            mini_batch.append(row)
        mini_batches.append(mini_batch)
    return mini_batches


@torch.no_grad()
def _log_probs(model: torch.nn.Module, row: dict[str, Any]) -> torch.Tensor:
    tokens, start = torch.cat([row["prompt"], row["response"]]), len(row["prompt"])
    log_probs_PV = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return log_probs_PV[start - 1 : -1].gather(1, row["response"][:, None])[:, 0]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("received")
    tiny_model(layers=2).save_pretrained(folder / "qwen3")
    torch.save(_plan(), folder / "plan.pt")
    return start_ranks("tests.verl_ext.received_ranks", folder, 2)


@cache
def _composed() -> DictConfig:
    actor = "actor_rollout_ref.actor"
    return verls_on_cpu(f"{actor}.ppo_epochs={ranks.EPOCHS}", f"{actor}.loss_scale_factor={ranks.SCALE}")


def _receipt(
    of_ranks: list[list[OptimiserStep]],
    loss: str,
    aggregation: str,
    skips: bool,
    rejected: bool = False,
) -> tuple[Receipt, list[dict[str, Any]]]:
    """The trainer's receipt of these steps."""
    rows = [row for mini_batch in _plan() for row in mini_batch]

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)

    config = copy.deepcopy(_composed())
    config.actor_rollout_ref.actor.policy_loss.loss_mode = loss
    config.actor_rollout_ref.actor.loss_agg_mode = aggregation
    mask_BT, advantages_BT = padded("mask").bool(), padded("advantages")
    if rejected:
        mask_BT[:, 0] = False
    trained = trains([row["advantages"] for row in rows], [row["mask"] for row in rows])
    sent = trained if skips else [True] * len(rows)
    chosen = [place for place, row in enumerate(rows) if row["written"] >= 0]
    keys = [f"r{place}" for place in chosen]
    part: Any = SimpleNamespace(
        rollouts=SimpleNamespace(mask=mask_BT[chosen], keys=keys), advantages=advantages_BT[chosen]
    )
    columns = {"old_log_probs": padded("old_log_probs")[chosen], "rollout_is_weights": padded("weights")[chosen]}
    receipt = receipt_of(
        Written("1.0", 0, chosen, part, columns),
        of_ranks,
        sent=sent,
        tokens=mask_BT.sum(dim=1).tolist(),
        loss=loss_of(Settings.parse(config)),
        epochs=ranks.EPOCHS,
        on_policy=False,
    )
    return receipt, [rows[place] | {"sent": sent[place], "place": place} for place in chosen]


def _slope(loss: str, row: dict[str, Any], t: int, log_probs_T: torch.Tensor) -> float:
    """The effective advantage by the loss's definition, token by token."""
    kept = [u for u in range(len(row["mask"])) if row["mask"][u]]
    advantage, weight, moved = float(row["advantages"][t]), float(row["weights"][t]), log_probs_T - row["old_log_probs"]
    ratio = math.exp(float(moved[t]))
    if loss == "gspo":
        ratio = math.exp(sum(float(moved[u]) for u in kept) / len(kept))
    if loss in ("vanilla", "gspo"):
        outside = ratio > 1.2 if advantage > 0 else ratio < 0.8 or (loss == "vanilla" and ratio > 3)
        return 0.0 if outside else advantage * ratio * weight
    if loss == "cispo":
        return advantage * min(max(ratio, 0.8), 1.2) * weight
    assert loss == "gpg"
    return advantage * weight


def _setups(kind: str, results: list[Results]) -> list[tuple[str, list[Any]]]:
    return [(name, of_all_ranks(results, kind, name)) for name in ranks.EXPERIMENTS[kind]]


@pytest.mark.slow
def test_the_update_is_the_same_bit_for_bit(results: list[Results]) -> None:
    compared = 0
    for name, of_ranks in [*_setups("updates", results), *_setups("sliced", results)]:
        for result in of_ranks:
            for loss, aggregation, skips in {key[:3] for key in result}:
                without, watched = (result[loss, aggregation, skips, read] for read in (False, True))
                assert all(map(torch.equal, watched["parameters"], without["parameters"])), name
                losses = [
                    {k: v for k, v in each["metrics"].items() if "perf" not in k and k != "mfu"}
                    for each in (watched, without)
                ]
                assert losses[0] == losses[1]
                compared += 1
    assert compared >= 18 * len(results)


@pytest.mark.slow
def test_no_false_alarm_and_every_token_as_the_definition_says(
    results: list[Results],
) -> None:
    rows_of_step = len(LENGTHS[0])
    tokens_of_step = [sum(int(row["mask"].sum()) for row in mini_batch) for mini_batch in _plan()]
    clipped = 0
    for name, of_all in [*_setups("updates", results), *_setups("sliced", results)]:
        for loss, aggregation, skips, watched in of_all[0]:
            if not watched:
                continue
            case = f"{name}, {loss}, {aggregation}, {skips}"
            of_ranks = [result[loss, aggregation, skips, True]["steps"] for result in of_all]
            of_ranks = [steps for steps in of_ranks if steps is not None]
            receipt, rows = _receipt(of_ranks, loss, aggregation, skips)
            assert not receipt.findings, (case, [str(finding) for finding in receipt.findings])
            assert len(receipt.received_UBT) == ranks.EPOCHS * len(LENGTHS)
            if loss in ("sapo", "dppo_tv", "dppo_kl"):
                continue
            clipped += int((receipt.clipped_BT > 0).sum())
            for b, row in enumerate(rows):
                held = receipt.received_UBT[:, b].isfinite().any(dim=1).nonzero().flatten().tolist()
                own = row["place"] // rows_of_step
                assert held == ([own, own + len(LENGTHS)] if row["sent"] else []), case
                for update in held:
                    log_probs_T, gradient_T = _pieces(of_ranks, update, b, len(row["response"]))
                    divisor = {
                        "token-mean": tokens_of_step[own],
                        "token-sum": 1,
                        "seq-mean-token-sum": rows_of_step,
                        "seq-mean-token-mean": rows_of_step * int(row["mask"].sum()),
                        "seq-mean-token-sum-norm": rows_of_step * ranks.SCALE,
                    }[aggregation]
                    for t in range(len(row["response"])):
                        wanted = _slope(loss, row, t, log_probs_T) if row["mask"][t] else 0.0
                        assert -float(gradient_T[t]) / len(of_ranks) * divisor == pytest.approx(
                            wanted, rel=1e-4, abs=1e-6
                        ), case
                        assert float(receipt.received_UBT[update, b, t]) == pytest.approx(wanted, rel=1e-4, abs=1e-6), (
                            case
                        )
                assert row["sent"] or receipt.received_BT[b].isnan().all()
    assert clipped > 20


def _pieces(
    of_ranks: list[list[OptimiserStep]], update: int, row: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and gradient of a response in an optimiser step."""
    found = [
        (piece.log_probs_bT[place], piece.gradient_bT[place])
        for steps in of_ranks
        for piece in steps[update].pieces
        for place, other in enumerate(piece.rows_b.tolist())
        if other == row
    ]
    assert len(found) == 1
    return tuple(torch.nn.functional.pad(values, (0, length - len(values))) for values in found[0])  # type: ignore[return-value]


@pytest.mark.slow
def test_the_log_probabilities_are_the_models(results: list[Results]) -> None:
    """Of the first optimiser step, and so of the tokens that they are said to be of."""
    model, rows = tiny_model(layers=2), [row for mini_batch in _plan() for row in mini_batch]
    for name, of_all in _setups("updates", results):
        seen = 0
        for result in of_all:
            for piece in result["vanilla", "token-mean", False, True]["steps"][0].pieces:
                for place, log_probs_T in zip(piece.rows_b.tolist(), piece.log_probs_bT, strict=True):
                    (row,) = [row for row in rows if row["written"] == place]
                    wanted_T = _log_probs(model, row)
                    torch.testing.assert_close(log_probs_T[: len(wanted_T)], wanted_T, rtol=1e-4, atol=1e-4)
                    seen += 1
                assert not piece.outside_b.any()
        assert seen == 3, name


@pytest.mark.slow
def test_verl_divides_by_rejected_tokens_too(results: list[Results]) -> None:
    """verl 0.9.1's ``token-mean`` divides by the sum of ``loss_mask`` (``FSDPEngine.forward_backward_batch``), while a rollout
    correction that rejects tokens changes ``response_mask`` alone: every token receives less than a mean over the kept ones."""
    of_all = of_all_ranks(results, "rejected", next(iter(ranks.SETUPS)))
    of_ranks = [result["vanilla", "token-mean", False, True]["steps"] for result in of_all]
    receipt, _ = _receipt(of_ranks, "vanilla", "token-mean", False, rejected=True)
    generated = [sum(int(row["mask"].sum()) for row in mini_batch) for mini_batch in _plan()]
    kept = [count - len(LENGTHS[0]) for count in generated]
    # The factor differs between optimiser steps, whose numbers of tokens do.
    assert receipt.findings and all(finding.name == "scaled" and finding.mismatch for finding in receipt.findings)
    factors = [pytest.approx(few / all_, rel=1e-4) for few, all_ in zip(kept, generated, strict=True)]
    assert all(finding.size in factors for finding in receipt.findings)


@pytest.mark.slow
def test_a_gradient_on_the_prompt_is_named(results: list[Results]) -> None:
    """Of one micro-batch's data. Other faults of an engine are in ``core/test_receipt.py``."""
    of_all = of_all_ranks(results, "updates", next(iter(ranks.SETUPS)))
    of_ranks = [result["vanilla", "token-mean", False, True]["steps"] for result in of_all]
    for steps in of_ranks:
        steps[2].pieces[:] = [
            replace(piece, outside_b=torch.full_like(piece.outside_b, 0.1)) for piece in steps[2].pieces
        ]
    receipt, _ = _receipt(of_ranks, "vanilla", "token-mean", False)
    assert [finding.name for finding in receipt.findings] == ["outside"]


def test_an_error_in_the_watch_stops_no_training_and_is_told_afterwards() -> None:
    watch = UpdateReader()
    calls: list[Any] = []
    worker: Any = SimpleNamespace(loss_fn=lambda **kwargs: calls.append(kwargs), engine=SimpleNamespace())
    own = worker.loss_fn
    from verl.utils import tensordict_utils as tu

    data = tu.get_tensordict({"x": torch.zeros(1, 1)}, non_tensor_dict={"receipt_update": "3.0"})
    with watch.optimiser_step(worker, data, [0]):
        worker.loss_fn(model_output={}, data=data, dp_group=None)
    assert len(calls) == 1 and worker.loss_fn is own
    with pytest.raises(KeyError):
        watch.take("3.0")
    with pytest.raises(RuntimeError, match="not watched"):
        watch.take("3.0")
