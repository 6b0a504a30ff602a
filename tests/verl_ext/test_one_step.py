"""One step through the trainer's two stages, with a store in memory and workers that make saliencies up: what is fetched, what
is computed once, and what the seconds say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.trainer.ppo.v1.utils import MetricsAggregator

from grail_advantage import Grail, Method, Rollouts, data
from grail_advantage.verl_ext import trainers  # noqa: F401  registers them
from grail_advantage.verl_ext.exchange import SALIENCY_FIELDS
from grail_advantage.verl_ext.settings import ACTOR
from grail_advantage.verl_ext.step import mean_of_loss
from grail_advantage.verl_ext.trainer import TIMING, TokenWeightTrainer
from tests.core.tiny_models import encode
from tests.verl_ext.one_step import BACKWARD, Store, Workers, make_trainer

CORRECTION = "algorithm.rollout_correction"
ROWS = [
    ("a_0_0", "Two?", r"So 2 is \boxed{2}.<end>", 1.0),
    ("a_1_0", "Two?", r"Is it \boxed{3}, maybe?<end>", 0.0),
    ("a_2_0", "Two?", r"I say \boxed{1}<end>", 0.0),
    ("b_0_0", "And five?", r"One \boxed{5}<end>", 1.0),
    ("b_1_0", "And five?", r"No \boxed{4} but \boxed{6}!<end>", 0.0),
    ("b_2_0", "And five?", r"Never heard of it.<end>", 0.0),
]
WRONG = {"a_1_0", "a_2_0", "b_1_0"}
"""Responses with an answer that is."""


class Step:
    """A trainer with a batch, and what happened in a step."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        overrides: Sequence[str],
        cls: type | None = None,
        written: Callable[[str], str] = str,
    ) -> None:
        self.store = Store()
        self.store.install(monkeypatch)
        self.calls: Counter[str] = Counter()
        self._count(monkeypatch, data, "find_generated_spans")
        self._count(monkeypatch, trainer_base, "compute_advantage_for_multi_trajectories")
        monkeypatch.setattr(trainer_base, "calculate_debug_metrics", lambda data: {})
        self._count(monkeypatch, Grail, "select")
        self.workers = Workers(self.store)
        self.trainer = make_trainer(["actor_rollout_ref.rollout.n=3", *overrides], Grail(), self.workers, cls=cls)
        for key, prompt, response, reward in ROWS:
            ids = torch.tensor(encode(written(response)))
            ones, last = torch.ones(len(ids), dtype=torch.int64), torch.tensor([len(ids) - 1])
            self.store.rows[key] = {
                "uid": key.split("_")[0],
                "prompts": torch.tensor(encode(prompt)),
                "responses": ids,
                "response_mask": ones,
                "loss_mask": ones,
                "rollout_log_probs": torch.full((len(ids),), -0.1),
                "rm_scores": torch.zeros(len(ids)).index_fill(0, last, reward),
            }

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        inner: Callable = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def set_signal(self, signal: Method) -> None:
        """Another method."""
        self.trainer.settings = replace(self.trainer.settings, signal=signal)

    def run(self) -> dict[str, torch.Tensor]:
        """Both stages; the advantages by key."""
        keys = list(self.store.rows)
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
        batch = self.trainer._compute_old_log_prob(batch, {})
        self.metrics: dict[str, float] = {}
        batch = self.trainer._compute_advantage(batch, self.metrics)
        assert batch.keys == keys
        return {key: self.store.rows[key]["advantages"] for key in keys}


ALONE = "algorithm.token_weights.share_forward=false"


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(map(torch.equal, found.values(), expected.values()))


def test_fetches_and_computes_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = Step(monkeypatch, [ALONE])
    expected = apart.run()
    monkeypatch.undo()
    scales_logits = Step(monkeypatch, [])
    scales_logits.trainer._model_shares_forward = False
    assert _same(scales_logits.run(), expected) and scales_logits.workers.shared == []
    monkeypatch.undo()
    step = Step(monkeypatch, [])
    assert _same(step.run(), expected)
    assert any(len(values.unique()) > 2 for values in expected.values())
    assert set(step.workers.shared) == WRONG
    assert step.workers.own == []
    assert len(apart.workers.own) == len(WRONG)
    for name in ("prompts", "loss_mask", "advantages", *SALIENCY_FIELDS):
        assert step.store.fetched[name] == 1, name
    # The others are read by verl too, in one or in both of its stages.
    verls = {"responses": 1, "rm_scores": 1, "response_mask": 2}
    assert {name: step.store.fetched[name] - times for name, times in verls.items()} == dict.fromkeys(verls, 1)
    counts = {"find_generated_spans": 1, "compute_advantage_for_multi_trajectories": 1}
    assert apart.calls == counts | {"select": 1}
    assert step.calls == counts | {"select": 2}, "before the forward that is shared, and by the final advantages"


def test_a_correction_that_drops_tokens_chooses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected: the whole of one incorrect response."""
    step = Step(monkeypatch, [f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2.0'"])
    for key, row in step.store.rows.items():
        row["rollout_log_probs"] = torch.full((len(row["responses"]),), -3.0 if key == "a_1_0" else -0.1)
    found = step.run()
    assert (found["a_1_0"] == 0).all()
    assert (found["a_2_0"] != 0).all()
    assert step.calls == {"find_generated_spans": 1, "compute_advantage_for_multi_trajectories": 1, "select": 2}
    assert step.metrics["grail/shared_forward_rate"] == 1
    assert step.workers.own == []


def _in_hashes(text: str) -> str:
    return text.replace("\\boxed{", "#### ").replace("}", " ")


@pytest.mark.parametrize("extra", [[], [ALONE]], ids=["shared forward", "own pass"])
def test_answers_in_another_format(monkeypatch: pytest.MonkeyPatch, extra: list[str]) -> None:
    step = Step(monkeypatch, ["algorithm.token_weights.answer=hashes", *extra], written=_in_hashes)
    found = step.run()
    assert (set(step.workers.shared), len(step.workers.own)) == ((WRONG, 0) if not extra else (set(), len(WRONG)))
    for key, _, text, _ in ROWS[:5]:
        at = _in_hashes(text).index("#### ") + 5  # official takes the first
        weights_T = found[key] / found[key][-1]
        assert weights_T[at] == 5 and (weights_T[at + 1 :] == 1).all() and (weights_T[at - 5 : at] == 1).all()
        assert (len(weights_T[: at - 5].unique()) > 1) == (key in WRONG)
    assert step.metrics["grail/answer_found_rate"] == 5 / 6
    monkeypatch.undo()
    step = Step(monkeypatch, extra, written=_in_hashes)
    assert all(len(values.unique()) == 1 for values in step.run().values()), "in the default format there are none"


def test_a_first_batch_without_answers_stops(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("grail_advantage.answers.missing.ENOUGH", len(ROWS))
    for choice in ("warn", "ignore"):
        with monkeypatch.context() as patched:
            Step(patched, [f"algorithm.token_weights.missing_answers={choice}"], written=_in_hashes).run()
        assert ("0 of 6 responses have an answer in the format boxed" in caplog.text) == (choice == "warn")
        caplog.clear()
    step = Step(monkeypatch, [], written=_in_hashes)
    message = r"algorithm\.token_weights\.answer=hashes .* in 5 of 6\. algorithm\.token_weights\.missing_answers=warn"
    with pytest.raises(ValueError, match=message):
        step.run()
    assert not step.workers.shared + step.workers.own


class OtherAdvantages(PPOTrainerSync):
    """A trainer's own way to advantages."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        data = trainer_base.tq.kv_batch_get(batch.keys, batch.partition_id, ["advantages"])
        fields = TensorDict({"advantages": -data["advantages"]}, batch_size=len(batch))
        return trainer_base.tq.kv_batch_put(batch.keys, batch.partition_id, fields)


class OtherAdvantagesWithTokenWeights(TokenWeightTrainer, OtherAdvantages):
    own_advantages = True


def test_a_trainers_own_advantages_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, [], OtherAdvantagesWithTokenWeights)
    found = step.run()
    assert set(step.workers.shared) == WRONG
    # The correct responses are those with a negative advantage now, and their scores come from a pass of their own.
    right = [
        torch.tensor(encode(prompt + response.partition("}")[0] + "}"))
        for _, prompt, response, reward in ROWS
        if reward
    ]
    assert len(step.workers.own) == 2
    assert all(any(torch.equal(tokens, row) for row in right) for tokens in step.workers.own)
    assert (found["a_0_0"] < 0).all()
    assert len(found["a_0_0"].unique()) > 2
    assert step.calls == {"find_generated_spans": 1, "compute_advantage_for_multi_trajectories": 1, "select": 2}


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, [])
    step.run()
    timing = step.trainer.timing_raw
    parts = {name: value for name, value in timing.items() if name.startswith(f"{TIMING}_")}
    assert set(parts) == {f"{TIMING}_{part}" for part in ("rows", "backward", "weighting")}
    assert parts[f"{TIMING}_backward"] == BACKWARD
    assert timing[TIMING] == pytest.approx(sum(parts.values()))
    first = dict(timing)
    step.run()  # the next update of the same step
    assert timing[f"{TIMING}_backward"] == 2 * BACKWARD
    assert all(timing[name] > first[name] for name in (*parts, TIMING))
    assert timing[TIMING] == pytest.approx(sum(timing[name] for name in parts))
    aggregator = MetricsAggregator()
    assert {aggregator._get_aggregation_type(f"timing_s/{name}") for name in timing} == {"time_sum"}


class TestRewardsThatAreNotFinite:
    """Of one response. verl alone gives its whole prompt NaN, and skips the update over it."""

    BAD = "a_2_0"

    def _run(
        self, monkeypatch: pytest.MonkeyPatch, value: float, *overrides: str, cls: type | None = None
    ) -> tuple[Step, dict[str, torch.Tensor]]:
        step = Step(monkeypatch, overrides, cls)
        self._set(step, value)
        return step, step.run()

    def _set(self, step: Step, value: float) -> None:
        step.store.rows[self.BAD]["rm_scores"][-1] = value

    def _without(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, torch.Tensor]:
        """The same step over the other responses alone."""
        kept = [row for row in ROWS if row[0] != self.BAD]
        with monkeypatch.context() as patch:
            patch.setattr("tests.verl_ext.test_one_step.ROWS", kept)
            return Step(patch, overrides).run()

    @pytest.mark.parametrize(
        ("value", "how", "normalised"),
        [
            (math.nan, "shared", "true"),
            (math.inf, "alone", "true"),
            (-math.inf, "shared", "false"),
            (math.nan, "alone", "false"),
        ],
    )
    def test_trains_nothing_and_reaches_no_other(
        self, value: float, how: str, normalised: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        overrides = [f"algorithm.norm_adv_by_std_in_grpo={normalised}", *([ALONE] if how == "alone" else [])]
        expected = self._without(monkeypatch, *overrides)
        with monkeypatch.context() as patch:
            step, found = self._run(patch, value, *overrides)
        assert (found.pop(self.BAD) == 0).all()
        assert found.keys() == expected.keys()
        assert _same(found, expected)
        assert any(len(values.unique()) > 2 for values in found.values())
        assert step.metrics["grail/unjudged_rate"] == pytest.approx(1 / len(ROWS))
        assert all(math.isfinite(value) for value in step.metrics.values())
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "1 of 6 responses, such as a_2_0, have no finite reward" in caplog.text
        assert step.workers.own == [] or how == "alone"

    def test_with_advantages_of_a_trainers_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """There only the responses that have none lose theirs."""
        with monkeypatch.context() as patch:
            expected = Step(patch, [], OtherAdvantagesWithTokenWeights).run()
        _, found = self._run(monkeypatch, float("nan"), cls=OtherAdvantagesWithTokenWeights)
        assert all((found[key] == 0).all() for key in found if key.startswith("a_"))
        assert all(torch.equal(found[key], expected[key]) for key in found if key.startswith("b_"))


class Judging(Method):
    """Gives what a reward function said."""

    formula, source = "the field", "a test"
    reads = frozenset({"tokens", "groups", "field:blame"})
    gives = "advantages"
    name: ClassVar[str] = "judging"
    section: ClassVar[str] = "judging"

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("the field is missing")


def test_a_field_that_no_row_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, [])
    step.set_signal(Judging())
    for row in step.store.rows.values():
        row["extra_fields"] = {"turn_scores": [], "reward_extra_info": {"acc": 1.0}}
    with pytest.raises(ValueError, match=r"judging reads field:blame, which no response has.* give acc, turn_scores"):
        step.run()


MEANS = {
    ("token-mean", None): 7 / 3,
    ("seq-mean-token-sum", None): 7 / 2,
    ("seq-mean-token-mean", None): 11 / 4,
    ("seq-mean-token-sum-norm", None): 7 / 2 / 3,
    ("seq-mean-token-sum-norm", 8): 7 / 2 / 8,
}


@pytest.mark.parametrize(("aggregation", "factor"), MEANS)
def test_the_mean_of_the_runs_loss(aggregation: str, factor: int | None) -> None:
    """Which a method's threshold is compared with; without a factor the last one divides by the batch's width."""
    options = [f"{ACTOR}.loss_agg_mode={aggregation}", f"{ACTOR}.loss_scale_factor={factor or 'null'}"]
    settings = make_trainer(options, Grail(), None).settings
    values_BT = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    assert mean_of_loss(settings)(values_BT, mask_BT) == pytest.approx(MEANS[aggregation, factor], rel=1e-6)
