"""Updates without the zero-advantage responses are the updates with them: losses alone, and engines on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from grail_advantage.verl_ext.rules import SKIPPABLE
from tests.core.tiny_models import tiny_model
from tests.verl_ext import zero_advantage_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks

MINI_BATCHES = (
    # On two ranks: only the first has responses that train. Of them one keeps a token of ten, one nothing but a masked token.
    [(5, 9, 9), (3, 12, 0), (6, 14, 3), (4, 8, 0), (3, 15, 0), (7, 6, 0), (2, 11, 0), (5, 5, 0)],
    [(4, 10, 0), (6, 7, 0), (3, 12, 0), (8, 4, 0), (5, 8, 0), (2, 13, 0), (6, 6, 0), (4, 9, 0)],
    [(3, 7, 0), (6, 11, 6), (4, 13, 0), (5, 5, 0), (4, 12, 12), (7, 9, 2), (3, 16, 16), (2, 8, 1)],
)
"""Each response's tokens of prompt and response, and those up to the last one with an advantage."""


def _row(generator: torch.Generator, prompt: int, response: int, trained: int) -> dict[str, torch.Tensor]:
    def draw(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator)

    advantages = torch.where(torch.arange(response) < trained, draw(response), 0.0)
    mask = torch.ones(response, dtype=torch.int64)
    if response > 8:
        mask[4] = 0  # of a tool
        advantages[4] = 0 if trained > 4 else 1.0
    return {
        "prompt": torch.randint(0, 90, (prompt,), generator=generator),
        "response": torch.randint(0, 90, (response,), generator=generator),
        "mask": mask,
        "advantages": advantages,
        "weights": 0.5 + draw(response).abs(),
        "noise": 0.3 * draw(response),
    }


def _plan() -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return [[_row(generator, *row) for row in mini_batch] for mini_batch in MINI_BATCHES]


def _start(folder: Any) -> list[Results]:
    from peft import LoraConfig, get_peft_model

    tiny_model(layers=2).save_pretrained(folder / "qwen3")
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_model(layers=2), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    adapted.save_pretrained(folder / "adapter")
    torch.save(_plan(), folder / "plan.pt")
    return start_ranks("tests.verl_ext.zero_advantage_ranks", folder, 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """All experiments, on two ranks."""
    return _start(tmp_path_factory.mktemp("zero_advantage"))


def _assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], rtol: float) -> None:
    largest = max(float(values.detach().abs().max()) for values in expected if values.numel())
    assert largest > 1e-5
    for of_one, of_other in zip(found, expected, strict=True):
        torch.testing.assert_close(of_one, of_other, rtol=0, atol=rtol * largest)


def _check(of_ranks: list[dict], loss: str, aggregation: str, rtol: float) -> None:
    for result in of_ranks:
        verl, skipped = result[loss, aggregation, "verl"], result[loss, aggregation, "skipped"]
        first, without_any, last = zip(skipped["gradients"], verl["gradients"], strict=True)
        _assert_close(*first, rtol)
        _assert_close(*last, rtol)
        assert all((values == 0).all() for of_one in without_any for values in of_one)
        _assert_close(skipped["moved"], verl["moved"], rtol)
        assert skipped["positions"] < 0.75 * verl["positions"]
        found, expected = skipped["metrics"], verl["metrics"]
        assert found.keys() == expected.keys()
        if not found:  # verl collects them from one rank of those with the same responses
            continue
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=rtol)
        assert found["loss"] == pytest.approx(expected["loss"], rel=rtol, abs=rtol)
        assert [norm > 0 for norm in expected["grad_norm"]] == [True, False, True]
        assert found.get("actor/ppo_kl", [0, 0, 0])[1] == 0  # of no response
    assert any(result[loss, aggregation, "verl"]["metrics"] for result in of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("setup", ranks.SETUPS)
def test_is_the_same_update_with_every_loss_and_aggregation(setup: str, results: list[Results]) -> None:
    of_ranks = of_all_ranks(results, "updates", setup)
    for loss, aggregation in ranks.combinations():
        _check(of_ranks, loss, aggregation, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("setup", ranks.FEW_SETUPS)
def test_is_the_same_update_in_other_engines(setup: str, results: list[Results]) -> None:
    of_ranks = of_all_ranks(results, "few_updates", setup)
    _check(of_ranks, "vanilla", "token-mean", 1e-4)


PACKED = "fsdp2, packed, a token budget"


def _plain_gradient(loss: str, plan: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The gradient of a mini-batch by the derivative of its loss at every log-probability, worked out by hand."""
    model = tiny_model(layers=2)
    count = sum(int(row["mask"].sum()) for row in plan)
    total = torch.zeros(())
    for row in plan:
        tokens, start = torch.cat([row["prompt"], row["response"]]), len(row["prompt"])
        log_probs_PV = (model(tokens[None]).logits[0] / 0.8).log_softmax(-1)
        own_T = log_probs_PV[start - 1 : -1].gather(1, row["response"][:, None])[:, 0]
        moved = [-float(noise) for noise in row["noise"]]
        kept = [t for t in range(len(own_T)) if row["mask"][t]]
        of_row = math.exp(sum(moved[t] for t in kept) / len(kept))
        for t in kept:
            advantage, ratio = float(row["advantages"][t]), math.exp(moved[t])
            if loss == "gspo":
                outside = of_row > 1.2 if advantage > 0 else of_row < 0.8
                slope = 0.0 if outside else advantage * of_row
            else:
                slope = advantage * min(max(ratio, 0.8), 1.2)
            total = total - slope * float(row["weights"][t]) * own_T[t] / count
    total.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_a_token_trains_with_its_own_advantage(loss: str, results: list[Results]) -> None:
    """In losses whose ratio is the response's, or takes no part in the gradient, a token's weight multiplies its gradient."""
    of_ranks = of_all_ranks(results, "updates", PACKED)
    assert len({round(float(value), 6) for row in _plan()[0] for value in row["advantages"] if value}) > 10
    expected = _plain_gradient(loss, _plan()[0])
    for name in ("verl", "skipped"):
        shards = zip(*(result[loss, ranks.TOKEN_MEAN, name]["gradients"][0] for result in of_ranks), strict=True)
        _assert_close([torch.cat(parts) for parts in shards], expected, 1e-3)


class TestLosses:
    """verl's losses without an engine: the gradient at each token's log-probability, of a batch and of parts of it."""

    LENGTHS = (9, 12, 8, 10, 14)
    TRAINED = (9, 0, 4, 0, 7)
    """Tokens with an advantage; responses 1 and 3 have none."""

    def _gradient(self, loss: str, aggregation: str, lengths: tuple[int, ...]) -> torch.Tensor:
        """With so many of the first tokens of each response, without those of 0; it is divided by the whole batch."""
        generator, longest = torch.Generator().manual_seed(0), max(self.LENGTHS)
        columns = torch.randn(4, len(self.LENGTHS), longest, generator=generator)
        rows = [row for row, length in enumerate(lengths) if length]
        log_prob, noise, advantages, weights = columns[:, rows, : max(lengths)]
        trained = torch.tensor(self.TRAINED)[rows, None]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[rows, None]
        log_prob = (-log_prob.abs()).requires_grad_()
        settings = PolicyLossConfig(
            loss_mode=loss, clip_cov_ratio=0.2, clip_cov_lb=0.01, kl_cov_ratio=0.2, dro_beta=0.1
        )
        if loss == "bypass_mode":
            correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
            object.__setattr__(settings, "rollout_correction", correction)
        actor = FSDPActorConfig(
            strategy="fsdp2", rollout_n=2, use_dynamic_bsz=True, loss_agg_mode=aggregation, policy_loss=settings
        )
        actor.global_batch_info.update(
            dp_size=1, batch_num_tokens=sum(self.LENGTHS), global_batch_size=len(self.LENGTHS), loss_scale_factor=20
        )
        torch.manual_seed(0)
        value, _ = get_policy_loss_fn(loss)(
            old_log_prob=log_prob.detach() + 0.3 * noise,
            log_prob=log_prob,
            advantages=torch.where(torch.arange(max(lengths)) < trained, advantages, 0.0),
            response_mask=mask,
            loss_agg_mode=aggregation,
            config=actor,
            rollout_is_weights=weights.abs(),
        )
        value.backward()
        gradient = torch.zeros(len(self.LENGTHS), longest)
        gradient[rows, : max(lengths)] = log_prob.grad
        return gradient

    def _same(self, loss: str, aggregation: str, lengths: tuple[int, ...]) -> bool:
        expected = self._gradient(loss, aggregation, self.LENGTHS)
        assert (expected[0] != 0).any()
        return torch.allclose(self._gradient(loss, aggregation, lengths), expected, rtol=1e-5, atol=1e-8)

    @pytest.mark.parametrize("aggregation", ranks.AGGREGATIONS)
    @pytest.mark.parametrize("loss", POLICY_LOSS_REGISTRY)
    def test_those_that_do_without_rows_that_have_no_advantage_are_let_through(
        self, loss: str, aggregation: str
    ) -> None:
        without = tuple(length if trained else 0 for length, trained in zip(self.LENGTHS, self.TRAINED, strict=True))
        if loss in SKIPPABLE or aggregation == ranks.TOKEN_MEAN:
            assert self._same(loss, aggregation, without) == (loss in SKIPPABLE)
