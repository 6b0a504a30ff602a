"""One step through the trainer's two stages, with a store in memory and workers that make scores up: what is fetched, what is
computed once, what the update gets, and what the seconds say."""

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
from verl.utils.tensordict_utils import get_tensordict

from grail_advantage import Grail, Method, Rollouts, data
from grail_advantage.verl_ext import trainers  # noqa: F401  registers them
from grail_advantage.verl_ext.host import TIMING
from grail_advantage.verl_ext.settings import ACTOR
from grail_advantage.verl_ext.step import mean_of_loss
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT
from tests.core.tiny_models import encode
from tests.verl_ext.one_step import Store, Workers, make_trainer

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
        self.trainer.settings = replace(self.trainer.settings, method=signal)

    def run(self) -> dict[str, torch.Tensor]:
        """The first stage; the advantages by key."""
        keys = list(self.store.rows)
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
        batch = self.trainer._compute_old_log_prob(batch, {})
        self.metrics: dict[str, float] = {}
        batch = self.trainer._compute_advantage(batch, self.metrics)
        assert batch.keys == keys
        return {key: self.store.rows[key]["advantages"] for key in keys}

    def update(self, *padding: str) -> tuple[KVBatchMeta, dict[str, float]]:
        """The second stage: the batch that the workers get, and the metrics."""
        asked: list[KVBatchMeta] = []

        def update_actor(batch: KVBatchMeta) -> TensorDict:
            asked.append(batch)
            return get_tensordict({}, non_tensor_dict={"metrics": {"actor/mfu": [0.0], "loss": [0.5]}})

        self.workers.update_actor = update_actor
        self.trainer.distillation_config = None
        keys, metrics = list(self.store.rows), {}
        tags = [{"is_padding": key in padding} for key in keys]
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        assert self.trainer._update_actor(batch, metrics).keys == keys
        assert self.trainer._weighed is None
        return asked[0], metrics


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(map(torch.equal, found.values(), expected.values()))


def test_fetches_and_computes_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, [])
    found = step.run()
    for key, values in found.items():
        assert (len(values.unique()) > 2) == (key in WRONG)
    assert len(step.workers.own) == len(WRONG)
    assert step.calls == {"find_generated_spans": 1, "compute_advantage_for_multi_trajectories": 1}
    # verl's two stages fetch twice, this package once.
    assert step.store.calls == 3 and step.store.fetched["advantages"] == 1
    assert step.store.fetched["prompts"] == step.store.fetched["loss_mask"] == 1
    assert not {"raw_prompt", "extra_fields", "ref_log_prob"} & step.store.fetched.keys()


def test_a_correction_that_drops_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected: the whole of one incorrect response."""
    step = Step(monkeypatch, [f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2.0'"])
    for key, row in step.store.rows.items():
        row["rollout_log_probs"] = torch.full((len(row["responses"]),), -3.0 if key == "a_1_0" else -0.1)
    found = step.run()
    assert (found["a_1_0"] == 0).all()
    assert (found["a_2_0"] != 0).all()
    assert len(step.workers.own) == 2


def _in_hashes(text: str) -> str:
    return text.replace("\\boxed{", "#### ").replace("}", " ")


def test_answers_in_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        step = Step(patch, ["algorithm.token_weights.answer=hashes"], written=_in_hashes)
        found = step.run()
    for key, _, text, _ in ROWS[:5]:
        at = _in_hashes(text).index("#### ") + 5  # official takes the first
        weights_T = found[key] / found[key][-1]
        assert weights_T[at] == 5 and (weights_T[at + 1 :] == 1).all() and (weights_T[at - 5 : at] == 1).all()
        assert (len(weights_T[: at - 5].unique()) > 1) == (key in WRONG)
    assert step.metrics["grail/answer_found_rate"] == 5 / 6
    step = Step(monkeypatch, [], written=_in_hashes)
    assert all(len(values.unique()) == 1 for values in step.run().values()), "in the default format there are none"


def test_a_first_batch_without_answers_stops(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("grail_advantage.answers.missing.ENOUGH", len(ROWS))
    for choice in ("warn", "ignore"):
        with monkeypatch.context() as patched:
            Step(patched, [f"algorithm.token_weights.missing_answers={choice}"], written=_in_hashes).run()
        assert ("0 of 6 responses have an answer in the format boxed" in caplog.text) == (choice == "warn")
        caplog.clear()
    step = Step(monkeypatch, [], written=_in_hashes)
    with pytest.raises(ValueError, match=r"algorithm\.token_weights\.answer=hashes .* in 5 of 6"):
        step.run()
    assert not step.workers.own


class OtherAdvantages(PPOTrainerSync):
    """A trainer's own way to advantages."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        data = trainer_base.tq.kv_batch_get(batch.keys, batch.partition_id, ["advantages"])
        fields = TensorDict({"advantages": -data["advantages"]}, batch_size=len(batch))
        return trainer_base.tq.kv_batch_put(batch.keys, batch.partition_id, fields)


class OtherAdvantagesWithTokenWeights(TokenWeightTrainer, OtherAdvantages):
    pass


def test_a_trainers_own_advantages_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, [], OtherAdvantagesWithTokenWeights)
    found = step.run()
    # The correct responses are those with a negative advantage now.
    right = [
        torch.tensor(encode(prompt + response.partition("}")[0] + "}"))
        for _, prompt, response, reward in ROWS
        if reward
    ]
    assert len(step.workers.own) == 2
    assert all(any(torch.equal(tokens, row) for row in right) for tokens in step.workers.own)
    assert (found["a_0_0"] < 0).all()
    assert len(found["a_0_0"].unique()) > 2


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(monkeypatch, [])
    step.run()
    timing = step.trainer.timing_raw
    assert timing.keys() == {TIMING, f"{TIMING}_pass"} and timing[TIMING] > timing[f"{TIMING}_pass"] > 0
    first = dict(timing)
    step.run()  # the next update of the same step
    assert all(timing[name] > first[name] for name in timing)
    aggregator = MetricsAggregator()
    assert {aggregator._get_aggregation_type(f"timing_s/{name}") for name in timing} == {"time_sum"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite(
    value: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The responses to its prompt train nothing in that step; the others are as without it."""
    with monkeypatch.context() as patch:
        expected = Step(patch, []).run()
    step = Step(monkeypatch, [])
    step.store.rows["a_2_0"]["rm_scores"][-1] = value
    found = step.run()
    for key, values in found.items():
        assert torch.equal(values, 0 * expected[key] if key[0] == "a" else expected[key])
    assert step.metrics["grail/unjudged_rate"] == 3 / 6 and all(map(math.isfinite, step.metrics.values()))
    assert "3 of 6 responses, such as a_0_0" in caplog.text


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
    assert mean_of_loss(settings, values_BT, mask_BT) == pytest.approx(MEANS[aggregation, factor], rel=1e-6)


class TestLeavingOut:
    """The update's batch where the second prompt's answers are all incorrect."""

    MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size=2"
    A = ("a_0_0", "a_1_0", "a_2_0")

    @pytest.fixture
    def step(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Step]:
        def run(*overrides: str, skips: bool = True) -> Step:
            step = Step(monkeypatch, [self.MINI_BATCH, *overrides])
            step.store.rows["b_0_0"]["rm_scores"][:] = 0
            step.run()
            step.workers._dispatch_info, step.trainer._skips = {"actor": [0, 1]}, skips
            return step

        return run

    def test_every_rank_gets_its_share_of_the_rows_that_train(self, step: Callable[..., Step]) -> None:
        asked, metrics = step().update()
        assert sorted(sum(key in self.A for key in asked.keys[start : start + 3]) for start in (0, 3)) == [1, 2]
        assert asked.extra_info[LEAVE_OUT] is True
        assert asked.extra_info["mini_batch_size"] == asked.extra_info["global_batch_size"] == 6
        left = [len(encode(prompt)) + len(encode(response)) for key, prompt, response, _ in ROWS if key not in self.A]
        assert metrics["token_weights/skipped_responses"] == 3
        assert metrics["token_weights/skipped_tokens"] == sum(left)
        assert step().update("b_1_0")[1]["token_weights/skipped_responses"] == 2, "padding is not counted"

    def test_the_order_stays_where_verl_shuffles_and_without_the_option(self, step: Callable[..., Step]) -> None:
        for skips in (True, False):
            asked, metrics = step(*([f"{ACTOR}.shuffle=True"] if skips else []), skips=skips).update()
            assert asked.keys == [key for key, *_ in ROWS]
            assert (LEAVE_OUT in asked.extra_info) == any("skipped" in name for name in metrics) == skips
