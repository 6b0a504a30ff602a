"""The trainer's two stages: what is fetched, what is computed once, on which advantages, and what the update gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import GenerationConfig, LlamaConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.workers.engine_workers import ActorRolloutRefWorker

from grail_advantage import Grail
from grail_advantage.data import Row, RowScores
from grail_advantage.method import build
from grail_advantage.methods.shear import Shear
from grail_advantage.verl_ext import host, patches
from grail_advantage.verl_ext.exchange import build_reply, rows_of
from grail_advantage.verl_ext.host import TIMING
from grail_advantage.verl_ext.settings import ACTOR, BASE, BASES, Settings
from grail_advantage.verl_ext.step import mean_of_loss, truncated
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT
from tests.core import reference
from tests.core.real_tokenizers import save_under_class
from tests.core.tiny_models import END_ID, encode
from tests.verl_ext.one_step import ROWS, WRONG, Step, Workers, made_up_saliency, make_trainer, row_of, same
from verl_cpu.tiny.model import build_tokenizer

Patch = pytest.MonkeyPatch
CORRECTION = "algorithm.rollout_correction"
REWARDS = [reward for *_, reward in ROWS]


def test_fetches_and_computes_everything_once(monkeypatch: Patch) -> None:
    step = Step(monkeypatch)
    found = step.run()
    assert {key for key, values in found.items() if len(values.unique()) > 2} == WRONG
    assert len(step.workers.own) == len(WRONG)
    # verl's two stages fetch twice, this package once.
    assert step.store.calls == 3 and step.store.fetched["advantages"] == 1
    assert step.store.fetched["prompts"] == step.store.fetched["loss_mask"] == 1
    assert not {"raw_prompt", "extra_fields", "ref_log_prob"} & step.store.fetched.keys()


def test_a_correction_that_drops_a_response(monkeypatch: Patch) -> None:
    step = Step(monkeypatch, f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2.0'")
    step.store.rows["a_1_0"]["rollout_log_probs"] *= 30
    found = step.run()
    assert (found["a_1_0"] == 0).all() and (found["a_2_0"] != 0).all() and len(step.workers.own) == 2


def test_answers_in_another_format(monkeypatch: Patch) -> None:
    def in_hashes(text: str) -> str:
        return text.replace("\\boxed{", "#### ").replace("}", " ")

    rows = {key: row_of(prompt, in_hashes(text), reward) for key, prompt, text, reward in ROWS}
    with monkeypatch.context() as patch:
        step = Step(patch, "algorithm.token_weights.answer=hashes", rows=rows)
        found = step.run()
    assert step.metrics["grail/answer_found_rate"] == 5 / 6
    assert {key for key, values in found.items() if len(values.unique()) > 2} == WRONG
    monkeypatch.setattr("grail_advantage.answers.missing.ENOUGH", len(ROWS))
    with pytest.raises(ValueError, match="answer=hashes"):  # the default format finds none
        Step(monkeypatch, rows=rows).run()


class OtherAdvantages(PPOTrainerSync):
    """A trainer's own way to advantages."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        data = trainer_base.tq.kv_batch_get(batch.keys, batch.partition_id, ["advantages"])
        fields = TensorDict({"advantages": -data["advantages"]}, batch_size=len(batch))
        return trainer_base.tq.kv_batch_put(batch.keys, batch.partition_id, fields)


class OtherAdvantagesWithTokenWeights(TokenWeightTrainer, OtherAdvantages):
    pass


def test_a_trainers_own_advantages_have_the_last_word(monkeypatch: Patch) -> None:
    """The correct responses are those with a negative advantage now."""
    step = Step(monkeypatch, cls=OtherAdvantagesWithTokenWeights)
    found = step.run()
    right = {key for key, *_, reward in ROWS if reward}
    assert {key for key, values in found.items() if len(values.unique()) > 2} == right
    assert all((found[key] < 0).all() for key in right) and len(step.workers.own) == len(right)


def test_seconds_of_a_steps_updates_add_up(monkeypatch: Patch) -> None:
    step = Step(monkeypatch)
    step.run()
    first = dict(step.trainer.timing_raw)
    assert first.keys() == {TIMING, f"{TIMING}_pass"} and first[TIMING] > first[f"{TIMING}_pass"] > 0
    step.run()
    assert all(step.trainer.timing_raw[name] > seconds for name, seconds in first.items())
    aggregator = MetricsAggregator()
    assert {aggregator._get_aggregation_type(f"timing_s/{name}") for name in first} == {"time_sum"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite(value: float, monkeypatch: Patch) -> None:
    """The responses to its prompt train nothing in that step; the others are as without it."""
    with monkeypatch.context() as patch:
        expected = Step(patch).run()
    step = Step(monkeypatch)
    step.store.rows["a_2_0"]["rm_scores"][-1] = value
    assert same(step.run(), {key: of * (key[0] != "a") for key, of in expected.items()})
    assert step.metrics["grail/unjudged_rate"] == 3 / 6 and all(map(math.isfinite, step.metrics.values()))


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

    A = ("a_0_0", "a_1_0", "a_2_0")

    @pytest.fixture
    def step(self, monkeypatch: Patch) -> Callable[..., Step]:
        def run(*overrides: str, skips: bool = True, padding: str = "") -> Step:
            step = Step(monkeypatch, f"{ACTOR}.ppo_mini_batch_size=2", *overrides)
            step.store.rows["b_0_0"]["rm_scores"][:] = 0
            step.run()
            step.workers._dispatch_info, step.trainer._skips = {"actor": [0, 1]}, skips
            step.update(padding)
            return step

        return run

    def test_every_rank_gets_its_share_of_the_rows_that_train(self, step: Callable[..., Step]) -> None:
        made = step()
        (asked,) = made.workers.updates
        assert sorted(sum(key in self.A for key in asked.keys[start : start + 3]) for start in (0, 3)) == [1, 2]
        assert asked.extra_info[LEAVE_OUT] is True
        assert asked.extra_info["mini_batch_size"] == asked.extra_info["global_batch_size"] == 6
        left = [len(encode(prompt)) + len(encode(response)) for key, prompt, response, _ in ROWS if key not in self.A]
        assert made.metrics["token_weights/skipped_responses"] == 3
        assert made.metrics["token_weights/skipped_tokens"] == sum(left)
        assert step(padding="b_1_0").metrics["token_weights/skipped_responses"] == 2, "padding is not counted"

    def test_the_order_stays_where_verl_shuffles_and_without_the_option(self, step: Callable[..., Step]) -> None:
        for skips in (True, False):
            made = step(*([f"{ACTOR}.shuffle=True"] if skips else []), skips=skips)
            (asked,) = made.workers.updates
            assert asked.keys == [key for key, *_ in ROWS]
            assert (LEAVE_OUT in asked.extra_info) == any("skipped" in name for name in made.metrics) == skips


class TestBase:
    """Weights on other advantages than GRPO's."""

    LENGTHS = torch.tensor([len(text.removesuffix("<end>")) + 1.0 for _, _, text, _ in ROWS])

    def by_hand(self, base: str) -> torch.Tensor:
        """The responses' advantages."""
        rewards, lengths = torch.tensor(REWARDS).view(2, 3), self.LENGTHS.view(2, 3)
        centred = rewards - rewards.mean(1, keepdim=True)
        if base == "grpo":
            return (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        if base == "rloo":
            return (rewards - (rewards.sum(1, keepdim=True) - rewards) / 2).flatten()
        if base == "opo":
            return (rewards - (rewards * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)).flatten()
        assert base == "reinforce_plus_plus_baseline"  # whitened over the batch's tokens
        tokens = centred.flatten().repeat_interleave(self.LENGTHS.long())
        return (centred.flatten() - tokens.mean()) / (tokens.var() + 1e-8).sqrt()

    @pytest.mark.parametrize("base", BASES)
    def test_weight_one_is_the_estimator_by_hand_and_weights_multiply_it(self, base: str, monkeypatch: Patch) -> None:
        expected = self.by_hand(base)
        with monkeypatch.context() as patch:
            plain = Step(patch, f"{BASE}={base}", method=build("uniform", {"mask_truncated": False})).run()
        for values_T, advantage in zip(plain.values(), expected, strict=True):
            torch.testing.assert_close(values_T, advantage.expand_as(values_T), rtol=1e-4, atol=1e-5)
        found = Step(monkeypatch, f"{BASE}={base}").run()
        for (key, _, text, _), advantage in zip(ROWS, expected, strict=True):
            weights_T, at = found[key] / advantage, text.find("boxed{") + 6
            assert float(weights_T[-1]) == pytest.approx(1, abs=1e-3)
            assert float(weights_T[at]) == pytest.approx(5 if at > 5 else 1, rel=1e-3)

    def test_an_estimator_of_ones_own(self, monkeypatch: Patch) -> None:
        def doubled(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Any:
            return (2 * token_level_rewards.sum(dim=1, keepdim=True) * response_mask,) * 2

        def by_token(token_level_rewards: torch.Tensor, **_: Any) -> Any:
            return token_level_rewards, token_level_rewards

        for name, estimator in (("doubled", doubled), ("by_token", by_token)):
            register_adv_est(name)(estimator)
        try:
            with monkeypatch.context() as patch:
                found = Step(patch, f"{BASE}=doubled", method=build("uniform", {"mask_truncated": False})).run()
            assert [values_T.unique().tolist() for values_T in found.values()] == [[2 * reward] for reward in REWARDS]
            with pytest.raises(ValueError, match="by_token"):
                Step(monkeypatch, f"{BASE}=by_token").run()
        finally:
            for name in ("doubled", "by_token"):
                del ADV_ESTIMATOR_REGISTRY[name]


class TestTools:
    """A response in which a tool wrote between the model's turns."""

    TURNS = ("I ask for it;", r"=\boxed{9}!", "so it", "?", r" is \boxed{3}, ok<end>")

    def test_weights_are_those_of_the_models_own_tokens(self, monkeypatch: Patch) -> None:
        """The plain computation has never seen the tool's tokens, but for the scores' positions."""
        step = Step(monkeypatch)
        step.store.rows["a_1_0"] |= (row := row_of("Two?", self.TURNS, 0.0))
        found_T, mask_T, start = step.run()["a_1_0"], row["response_mask"].bool(), len("Two?")
        scores_T = made_up_saliency(torch.cat([row["prompts"], row["responses"]]))[start - 1 : -1]
        text = "".join(self.TURNS[::2]).replace("<end>", "$")
        (span,) = reference.boxed_spans(text)
        # Positions after the answer have no gradient.
        scores_T = torch.where(torch.arange(len(scores_T)) < "".join(self.TURNS).rindex("}") + 2, scores_T, 0.0)
        weights = reference.row_weights(scores_T[mask_T].tolist(), span, -1.0, reference.resolve("official"))
        base = float(found_T[mask_T][-1])
        assert len(set(weights)) > 5 and base < 0 and (found_T[~mask_T] == 0).all()
        torch.testing.assert_close(found_T[mask_T], base * torch.tensor(weights), rtol=1e-4, atol=1e-5)

    def test_an_answer_that_a_tool_interrupts_is_none(self, monkeypatch: Patch) -> None:
        step = Step(monkeypatch)
        step.store.rows["a_1_0"] |= row_of("Two?", (r"I say \boxed{3", "tool", "} or so<end>"), 0.0)
        found_T = step.run()["a_1_0"][step.store.rows["a_1_0"]["response_mask"].bool()]
        assert len(step.workers.own) == 2 and len(found_T.unique()) == 1 and found_T[0] < 0
        assert step.metrics["grail/answer_found_rate"] == 4 / 6


class TestStart:
    """What the trainer takes from the model's folder, and the workers that it starts."""

    @pytest.mark.parametrize(("max_model_len", "context"), [(None, 48), (32, 32)])
    def test_the_context_and_the_end_tokens(self, tmp_path: Path, max_model_len: int | None, context: int) -> None:
        """verl's server takes the model's positions where rollout.max_model_len is unset; options of the model count."""
        build_tokenizer().save_pretrained(tmp_path)
        GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
        LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=64).save_pretrained(tmp_path)
        made = self._trainer(tmp_path, max_model_len, max_position_embeddings=48)
        made._init_tokenizer()
        assert made._context_length == context and made._end_tokens == {3, 4, made.tokenizer.eos_token_id}

    def test_a_tokenizer_that_loses_text_ends_the_run(self, tmp_path: Path) -> None:
        """One that the driver could not look at, as it was not there yet."""
        folder = save_under_class(build_tokenizer(), tmp_path / "model", "LlamaTokenizerFast", "llama")
        LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        with pytest.raises(ValueError, match="tokenizer"):
            self._trainer(folder, None)._init_tokenizer()

    def _trainer(self, folder: Path, max_model_len: int | None, **config: Any) -> Any:
        made = make_trainer([], Grail(), None)
        made.config.actor_rollout_ref.rollout.max_model_len = max_model_len
        model = {"_target_": "verl.workers.config.HFModelConfig", "path": str(folder)}
        made.config.actor_rollout_ref.model = {**model, "override_config": {"attn_implementation": "sdpa", **config}}
        made.settings = Settings.parse(made.config)
        return made

    @pytest.mark.parametrize(("strategy", "replaced"), [("megatron", False), ("fsdp2", True)])
    def test_workers_of_other_engines_are_verls_own(self, monkeypatch: Patch, strategy: str, replaced: bool) -> None:
        def init_resource_pool_mgr(self: Any) -> None:
            self.role_worker_mapping = {Role.ActorRollout: ActorRolloutRefWorker}

        monkeypatch.setattr(PPOTrainerSync, "_init_resource_pool_mgr", init_resource_pool_mgr)
        monkeypatch.setattr(host, "ray", SimpleNamespace(remote=lambda worker: worker))
        made = make_trainer([f"{ACTOR}.strategy={strategy}"], Grail(), None)
        made._init_resource_pool_mgr()
        expected = host.TokenWeightActorWorker if replaced else ActorRolloutRefWorker
        assert made.role_worker_mapping == {Role.ActorRollout: expected}


def test_a_step_without_a_pass_asks_nothing_of_the_engine(monkeypatch: Patch) -> None:
    found = []
    for strategy in ("fsdp2", "megatron"):
        with monkeypatch.context() as patch:
            step = Step(patch, f"{ACTOR}.strategy={strategy}", method=build("probability"))
            patch.delattr(Workers, "compute_token_scores")
            found.append(step.run())
    assert same(*found) and any(bool(advantages_T.any()) for advantages_T in found[0].values())


TRUNCATED: dict[str, list[tuple[str, int, int, str, bool]]] = {
    "at the limit of 6 without an end token": [
        *(("vllm", 100, 1, text, False) for text in ("abc<end>", "abcde<end>", "abcde", "abc", "")),
        ("vllm", 100, 1, "abcdeg", True),
        ("vllm", 100, 1, "abcdef", False),  # any of the end tokens ends a response
    ],
    "prompt_length + response_length = 9, less the prompt of 5": [
        *(("vllm", 100, 5, "abcd", True), ("sglang", 100, 5, "abc", False)),
    ],
    "the context, less the prompt": [
        *(("vllm", 8, 5, "abc", True), ("trtllm", 8, 5, "ab", False), ("vllm", 8, 5, "ab<end>", False)),
    ],
    "with SGLang one position less": [
        *(("sglang", 8, 5, "ab", True), ("sglang", 8, 5, "a", False), ("sglang", 9, 5, "abc", True)),
    ],
    "no room at all": [("sglang", 6, 5, "", True), ("vllm", 5, 5, "a", True)],
    "a tool wrote cd, and the last turn had what was left": [
        *(("vllm", 100, 1, text, text == "abfcde") for text in ("abfcde", "abfcd<end>", "abfcf")),
        *(("vllm", 6, 1, text, text == "abfcd") for text in ("abfcd", "abfc", "abfcf")),
    ],
}
"""Engine, length of the context and of the prompt, and the response; ``f`` ends a turn as ``<end>`` does."""


@pytest.mark.parametrize("cases", TRUNCATED.values(), ids=TRUNCATED)
def test_what_is_truncated(cases: list[tuple[str, int, int, str, bool]]) -> None:
    for engine, context, prompt, response, expected in cases:
        rollout = {"name": engine, "prompt_length": 3, "response_length": 6}
        plain = {"actor_rollout_ref": {"rollout": rollout}, "algorithm": {"adv_estimator": "grail"}}
        settings, end_tokens = Settings.parse(OmegaConf.create(plain)), {END_ID, encode("f")[0]}
        responses = [torch.tensor(encode(response))]
        found = truncated([torch.arange(prompt)], responses, settings, context, end_tokens)
        assert found.tolist() == [expected], (engine, context, response)


def test_copies_that_fill_up_a_rank_belong_to_no_group(monkeypatch: Patch) -> None:
    asked: list[Row] = []

    class Counting(Workers):
        def compute_token_scores(self, request: TensorDict) -> TensorDict:
            asked.extend(rows_of(request))
            return build_reply([RowScores(torch.full((row.length,), float(row.index))) for row in asked])

    step = Step(monkeypatch, method=Shear(), workers=Counting)
    step.workers._dispatch_info = {"actor": [0, 1]}
    rows = [Row(torch.arange(4 + i), 2, 2 + i, None, 1.0, group, i) for i, group in enumerate((0, 0, 1))]
    scores = step.trainer._run_pass(rows)
    assert [of_row.scores.tolist() for of_row in scores] == [[float(i)] * (2 + i) for i in range(3)]
    assert sorted(row.group for row in asked) == [-1, 0, 0, 1]


def test_saved_shards_no_longer_share_memory_with_the_policy() -> None:
    """A patch whose reason is a fault of verl's: it may go when this fails."""
    weight = torch.zeros(2)
    saved = {0: ({"weight": (weight.cpu(), "spec")}, "global")}
    weight += 1
    assert saved[0][0]["weight"][0].tolist() == [1, 1], "a copy by .cpu() is none in host memory"
    patches.copy_saved_shards(saved, 0)
    weight += 1
    assert saved[0][0]["weight"][0].tolist() == [1, 1]
