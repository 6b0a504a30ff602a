"""The update without zero-advantage responses is the update with them, and watching it changes nothing; what is read there is
what a plain computation says, over losses, aggregations, layouts, ranks and epochs."""

from functools import cache
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence

from grail_advantage.receipt import Receipt
from grail_advantage.verl_ext.dump import LOSS_COLUMNS, loss_of, receipt_of
from grail_advantage.verl_ext.exchange import PLACES, trains, update_places
from grail_advantage.verl_ext.rules import SKIPPABLE
from grail_advantage.verl_ext.settings import ACTOR, Settings
from tests.composed import verls_on_cpu
from tests.core.tiny_models import tiny_model
from tests.verl_ext import ranks
from tests.verl_ext.one_step import Fields
from tests.verl_ext.ranks import (
    PLAIN_UPDATE,
    TEMPERATURE,
    UPDATES,
    Results,
    epochs_of,
    start_ranks,
)

pytestmark = pytest.mark.slow

LENGTHS = ((5, 9), (3, 12), (6, 14), (4, 8), (3, 15), (7, 6), (2, 11), (5, 5))
"""Tokens of prompt and response, of the responses of each mini-batch."""
MINI_BATCHES = (
    # On two ranks: only the first has responses that train. One of them has nothing but a masked token.
    (9, 0, 3, 0, 0, 0, 0, 0),
    (0,) * 8,
    (0, 6, 0, 0, 15, 2, 11, 1),
)
"""Each response's tokens up to the last one with an advantage."""
WRITTEN = [0, 1, 2, *range(4, 3 * len(LENGTHS))]
"""Places of the responses that the token dump writes, of which one is left out."""


def _log_probs(model: torch.nn.Module, row: Fields) -> torch.Tensor:
    start = len(row["prompts"])
    log_probs_PV = (model(row["input_ids"][None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return log_probs_PV[start - 1 : -1].gather(1, row["responses"][:, None])[:, 0]


@cache
def rows() -> list[Fields]:
    """The responses of all mini-batches; old log-probabilities are the policy's, with noise that takes some ratios out of
    their bounds."""
    generator = torch.Generator().manual_seed(0)
    model = tiny_model(layers=2)

    def draw(length):
        return torch.randn(length, generator=generator)

    places_R2 = update_places(3 * len(LENGTHS), WRITTEN)
    batch = []
    for (prompt, response), trained in zip(LENGTHS * 3, chain(*MINI_BATCHES), strict=True):
        ids = torch.randint(0, 90, (prompt + response,), generator=generator)
        row = ranks.response(ids[:prompt], ids[prompt:])
        row["advantages"] = torch.where(
            torch.arange(response) < trained, draw(response), 0.0
        )
        if response > 8:
            # A tool wrote token 4. Its advantage trains nothing: where no other token has one, the response is left out.
            row["response_mask"][4] = 0
            row["advantages"][4] = 0 if trained > 4 else 1.0
        row["rollout_is_weights"] = 0.5 + draw(response).abs()
        row["old_log_probs"] = _log_probs(model, row).detach() + 0.3 * draw(response)
        row[PLACES] = places_R2[len(batch)]
        batch.append(row)
    return batch


def _trained() -> list[bool]:
    return trains(
        *([row[name] for row in rows()] for name in ("advantages", "response_mask"))
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All updates, on two ranks."""
    folder = tmp_path_factory.mktemp("updates")
    tiny_model(layers=2).save_pretrained(folder / "qwen3")
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    get_peft_model(tiny_model(layers=2), config).save_pretrained(folder / "adapter")
    torch.save(rows(), folder / "rows.pt")
    return start_ranks("updates", folder, 2)


def _assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]):
    """Up to a ten-thousandth of the largest value of all."""
    largest = max(
        float(values.detach().abs().max()) for values in expected if values.numel()
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(largest, 1e-5))


@pytest.mark.parametrize("setup", UPDATES)
def test_without_zero_advantage_responses_it_is_the_same_update(setup, results):
    """With each of verl's losses that leave responses out."""
    assert set(ranks.LOSSES) == set(SKIPPABLE)
    for result in [result["updates"][setup] for result in results]:
        for loss in UPDATES[setup][2]:
            # The second mini-batch has no response that trains: its gradients are 0, and not missing.
            trained = [True, False, True] * epochs_of(loss)
            verl = result[(*loss, "verl")]
            skipped = result[(*loss, "skipped, watched")]
            for trains_here, *gradients in zip(
                trained, skipped["gradients"], verl["gradients"], strict=True
            ):
                _assert_close(*gradients)
                assert trains_here or not any(values.any() for values in gradients[0])
            _assert_close(skipped["parameters"], verl["parameters"])
            # Fewer tokens went through the model.
            assert skipped["positions"] < 0.75 * verl["positions"]
            actual = skipped["metrics"]
            expected = verl["metrics"]
            assert actual.keys() == expected.keys()
            # verl collects them from one rank of those with the same responses.
            if actual:
                for name in ("grad_norm", "loss"):
                    close = pytest.approx(expected[name], rel=1e-4, abs=1e-4)
                    assert actual[name] == close, loss
                assert [norm > 0 for norm in expected["grad_norm"]] == trained
                # The second mini-batch is one filler on each rank, whose ratio is 1.
                assert actual.get("actor/ppo_kl", [0, 0])[1] == 0


@pytest.mark.parametrize("setup", UPDATES)
def test_watching_changes_nothing_bit_for_bit(setup, results):
    for result in [result["updates"][setup] for result in results]:
        plain = result[(*PLAIN_UPDATE, "verl")]
        actual = result[(*PLAIN_UPDATE, "watched")]
        assert all(map(torch.equal, actual["parameters"], plain["parameters"]))
        names = [name for name in plain["metrics"] if "perf" not in name and name != "mfu"]
        assert all(actual["metrics"][name] == plain["metrics"][name] for name in names)


def _receipt(
    results: list[Results], setup: str, loss: tuple[str, str], mode: str
) -> Receipt:
    """The trainer's receipt of the optimiser steps of the data-parallel ranks."""
    by_rank = [result["updates"][setup][(*loss, mode)]["steps"] for result in results]
    options = {"ppo_epochs": epochs_of(loss), "loss_scale_factor": ranks.SCALE}
    options["policy_loss.loss_mode"], options["loss_agg_mode"] = loss
    config = verls_on_cpu(*(f"{ACTOR}.{name}={value}" for name, value in options.items()))
    columns = {
        name: pad_sequence([row[name] for row in rows()], batch_first=True)
        for name in ("response_mask", "advantages", *LOSS_COLUMNS[:2])
    }
    mask_BT = columns["response_mask"].bool()
    responses = SimpleNamespace(
        mask=mask_BT[WRITTEN],
        keys=list(map(str, WRITTEN)),
        places=WRITTEN,
        columns={name: values_BT[WRITTEN] for name, values_BT in columns.items()},
    )
    advantages_BT = columns["advantages"] * mask_BT
    part = SimpleNamespace(rollouts=responses, advantages=advantages_BT[WRITTEN])
    return receipt_of(
        part,
        [steps for steps in by_rank if steps is not None],
        tokens=mask_BT.sum(dim=1).tolist(),
        sent=[trained or "skipped" not in mode for trained in _trained()],
        loss=loss_of(Settings.parse(config)),
        epochs=epochs_of(loss),
        on_policy=False,
    )


@pytest.mark.parametrize("setup", UPDATES)
def test_no_false_alarm_and_every_token_receives_what_was_intended(setup, results):
    clipped = 0
    cases = [(loss, "skipped, watched") for loss in UPDATES[setup][2]]
    for loss, mode in [(PLAIN_UPDATE, "watched"), *cases]:
        receipt = _receipt(results, setup, loss, mode)
        assert not receipt.findings, (loss, mode, *map(str, receipt.findings))
        clipped += int((receipt.clipped_BT > 0).sum())
        held_UBT = receipt.received_UBT.isfinite()
        # Each response is in one mini-batch of an epoch: those of the second one are in the optimiser steps 1 and 4.
        expected_UB = torch.zeros(3 * epochs_of(loss), len(WRITTEN), dtype=torch.bool)
        for b, place in enumerate(WRITTEN):
            trained = mode == "watched" or _trained()[place]
            expected_UB[place // len(LENGTHS) :: 3, b] = trained
        assert torch.equal(held_UBT.any(dim=2), expected_UB), (loss, mode)
        # And each token received its weight times the slope of the loss.
        received = receipt.received_UBT[held_UBT]
        expected = receipt.expected_UBT[held_UBT]
        torch.testing.assert_close(received, expected, rtol=1e-3, atol=1e-5)
        assert received.abs().max() > 0.1
    assert clipped > 4


@pytest.mark.parametrize("setup", ranks.LAYOUTS)
def test_the_updates_own_forward_gives_the_old_log_probabilities(setup, results):
    """The update is the one with verl's forward before it, with and without zero-advantage responses; its columns are those
    of that forward."""
    for result in [result["own_forward"][setup] for result in results]:
        verl = result["verl"]
        places = result["places"]
        trained = [place for place in places if _trained()[place]]
        for mode, updated in (("reused", places), ("reused, skipped, watched", trained)):
            reused = result[mode]
            for gradients in zip(reused["gradients"], verl["gradients"], strict=True):
                _assert_close(*gradients)
            _assert_close(reused["parameters"], verl["parameters"])
            if reused["metrics"]:
                # In the first epoch the ratio is 1, as the old log-probabilities are its own.
                ratios = reused["metrics"]["actor/ppo_kl"]
                assert ratios[0] == 0 and any(ratios)
                assert "actor/entropy_loss" not in reused["metrics"]
            for name, columns in reused["own_forward"].items():
                of_verl = dict(zip(places, result["columns"][name], strict=True))
                expected = {place: of_verl[place] for place in updated}
                torch.testing.assert_close(columns, expected, rtol=1e-4, atol=1e-5)
