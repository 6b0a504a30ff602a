"""The trainer's two stages: what is fetched, what is computed once, on which advantages, and what the update gets."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import GenerationConfig, LlamaConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker

from grail_advantage.data import Row, RowScores
from grail_advantage.method import build
from grail_advantage.methods.shear import Shear
from grail_advantage.model.probe import HALF_LIMIT, LIMIT, Finding
from grail_advantage.verl_ext import host
from grail_advantage.verl_ext.exchange import LEAVE_OUT, UPDATE, build_reply, rows_of
from grail_advantage.verl_ext.host import truncated
from grail_advantage.verl_ext.settings import (
    ACTOR,
    BASE,
    BASES,
    MODEL,
    ROLLOUT,
    SKIP,
    Settings,
)
from grail_advantage.verl_ext.trainer import TokenWeightTrainer
from tests.core.real_tokenizers import save_as_llamas
from tests.core.tiny_models import END_ID, encode
from tests.unjudged import UNJUDGED
from tests.verl_ext.one_step import INCORRECT, ROWS, Advantages, Step, row_of
from verl_cpu.tiny.model import build_tokenizer


def uneven(advantages: Advantages) -> set[str]:
    """Responses whose tokens have several advantages."""
    return {key for key, values in advantages.items() if len(values.unique()) > 2}


def test_fetches_and_computes_everything_once():
    step = Step()
    assert uneven(step.run()) == INCORRECT and len(step.workers.own) == len(INCORRECT)
    # verl's two stages fetch twice, this package once.
    assert step.store.calls == 3 and step.store.fetched["advantages"] == 1
    assert step.store.fetched["prompts"] == step.store.fetched["loss_mask"] == 1
    assert not {"raw_prompt", "extra_fields", "ref_log_prob"} & step.store.fetched.keys()


def test_answers_in_another_format(monkeypatch):
    def in_hashes(text):
        return text.replace("\\boxed{", "#### ").replace("}", " ")

    rows = {
        key: row_of(prompt, in_hashes(text), reward) for key, prompt, text, reward in ROWS
    }
    step = Step("algorithm.token_weights.answer=hashes", rows=rows)
    assert (
        uneven(step.run()) == INCORRECT and step.metrics["grail/answer_found_rate"] == 5 / 6
    )
    monkeypatch.setattr("grail_advantage.answers.missing.ENOUGH", len(ROWS))
    # The default format finds none.
    with pytest.raises(ValueError, match="answer"):
        Step(rows=rows).run()


class NegativeAdvantages(PPOTrainerSync):
    """A trainer's own way to advantages."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        data = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, ["advantages"])
        fields = TensorDict({"advantages": -data["advantages"]}, batch_size=len(batch))
        return transfer_queue.kv_batch_put(batch.keys, batch.partition_id, fields)


class OtherAdvantages(TokenWeightTrainer, NegativeAdvantages):
    """Its correct responses are those with a negative advantage."""


def test_a_trainers_own_advantages_have_the_last_word(caplog):
    """They are not made again where a reward cannot be used: that response trains nothing, and those with a finite advantage
    keep it."""
    step = Step(cls=OtherAdvantages)
    complete = step.run()
    # GRAIL weights responses with a negative advantage.
    correct = {key for key, *_, reward in ROWS if reward}
    assert uneven(complete) == correct and len(step.workers.own) == len(correct)
    assert all((complete[key] < 0).all() for key in correct)
    step = Step(cls=OtherAdvantages)
    step.rows["a_2_0"]["rm_scores"][-1] = math.nan
    for key, advantages_T in step.run().items():
        # In its group verl makes every advantage NaN.
        expected_T = complete[key] if key[0] == "b" else torch.zeros_like(advantages_T)
        assert torch.equal(advantages_T, expected_T), key
    # The reward is to blame for one response alone.
    assert "1 of 6 responses, such as a_2_0, have no finite reward" in caplog.text
    assert "2 of 6 responses, such as a_0_0, have a usable reward" in caplog.text


def scored(rewards: Sequence[float], *overrides: str) -> Step:
    """A step of four responses to one prompt with these rewards, and four to another; the advantages are not weighted."""
    by_key = {f"a_{number}_0": reward for number, reward in enumerate(rewards)}
    by_key |= {f"b_{number}_0": float(number % 3) for number in range(4)}
    rows = {
        key: row_of("Nine?", "I say 9."[: 3 + place], reward)
        for place, (key, reward) in enumerate(by_key.items())
    }
    overrides = ("algorithm.norm_adv_by_std_in_grpo=false", *overrides)
    return Step(*overrides, method=build("uniform"), rows=rows)


@pytest.mark.parametrize("name", UNJUDGED)
def test_a_reward_that_cannot_be_used_trains_nothing(name):
    """The others to its prompt are compared without it, as in TRL; those to another prompt are as they were."""
    rewards, expected = UNJUDGED[name]
    step = scored(rewards)
    advantages = step.run()
    untouched = scored([1.0, 0.0, 0.0, 1.0]).run()
    actual_B = step.trainer._weighed.rollouts.advantages
    assert actual_B[:4].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    for (key, values_T), value in zip(
        advantages.items(), actual_B.nan_to_num(), strict=True
    ):
        # What cannot be compared trains nothing.
        assert (values_T == value).all()
        assert key[0] == "a" or torch.equal(values_T, untouched[key])
    assert step.metrics["uniform/unjudged_rate"] == sum(map(math.isnan, expected)) / 8
    assert all(map(math.isfinite, step.metrics.values()))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("lost", [1, 2])
def test_a_base_does_not_see_responses_without_a_reward(base, lost):
    """Its advantages are those of a batch without them. Of one output of a session verl's GRPO makes the session's."""
    rewards = [1.0, 0.5, 0.0, 0.0]
    complete = scored(rewards, f"{BASE}={base}")
    for number in range(lost):
        del complete.rows[f"a_{number}_0"]
    advantages = scored([math.nan] * lost + rewards[lost:], f"{BASE}={base}").run()
    expected = complete.run()
    for key, advantages_T in advantages.items():
        expected_T = expected.get(key, torch.zeros_like(advantages_T))
        torch.testing.assert_close(advantages_T, expected_T)


MEANS = [
    ("token-mean", None, 7 / 3),
    ("seq-mean-token-sum", None, 7 / 2),
    ("seq-mean-token-mean", None, 11 / 4),
    ("seq-mean-token-sum-norm", None, 7 / 2 / 3),
    ("seq-mean-token-sum-norm", 8, 7 / 2 / 8),
]


@pytest.mark.parametrize(("aggregation", "factor", "mean"), MEANS)
def test_the_mean_of_the_runs_loss(aggregation, factor, mean):
    """Which a method's threshold is compared with; without a factor the last one divides by the batch's width."""
    options = [
        f"{ACTOR}.loss_agg_mode={aggregation}",
        f"{ACTOR}.loss_scale_factor={factor or 'null'}",
    ]
    step = Step(*options)
    step.run()
    # Sums 3 and 4 of three tokens: 7/3 a token, 7/2 a response, and the mean of 3/2 and 4 is 11/4.
    values_BT = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    assert step.trainer._weighed.rollouts.mean(values_BT, mask_BT) == pytest.approx(
        mean, rel=1e-6
    )


class TestLeavingOut:
    """The update's batch where the second prompt's answers are all incorrect."""

    def step(self, *overrides: str, skips: bool = True, padding: str = "") -> Step:
        step = Step(*overrides)
        step.rows["b_0_0"]["rm_scores"][:] = 0
        step.run()
        step.workers._dispatch_info = {"actor": [0, 1]}
        step.trainer._skips = skips
        step.update(padding)
        return step

    def test_every_rank_gets_its_share_of_the_rows_that_train(self):
        """Of three responses that train one rank gets one, the other two."""
        step = self.step()
        (request,) = step.workers.updates
        groups = "".join(key[0] for key in request.keys)
        assert sorted([groups[:3].count("a"), groups[3:].count("a")]) == [1, 2]
        assert request.extra_info[LEAVE_OUT] is True
        sizes = ("mini_batch_size", "global_batch_size")
        assert [request.extra_info[name] for name in sizes] == [6, 6]
        texts = [prompt + response for key, prompt, response, _ in ROWS if key[0] == "b"]
        assert step.metrics["token_weights/skipped_responses"] == 3
        tokens = sum(len(encode(text)) for text in texts)
        assert step.metrics["token_weights/skipped_tokens"] == tokens
        # One of the three fills up the batch, and is not counted.
        padded = self.step(padding="b_1_0")
        assert padded.metrics["token_weights/skipped_responses"] == 2

    @pytest.mark.parametrize("skips", [True, False])
    def test_the_order_stays_where_verl_shuffles_and_without_the_option(self, skips):
        step = self.step(*[f"{ACTOR}.shuffle=True"] * skips, skips=skips)
        (request,) = step.workers.updates
        assert request.keys == [key for key, *_ in ROWS]
        assert (LEAVE_OUT in request.extra_info) == skips
        assert any("skipped" in name for name in step.metrics) == skips


def test_responses_are_left_out_where_no_rank_finds_that_they_depend_on_others(monkeypatch):
    """The ranks are asked in the layout, up to the length and at the temperature of the run. One of them computes in
    single precision, where a smaller difference is no rounding."""
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: None)
    in_half_precision = Finding(0.05, HALF_LIMIT, "alone")
    depends = Finding(1e-3, LIMIT, "alone")
    for second, leaves_out in ((in_half_precision, True), (depends, False)):
        # Each of two ranks answers.
        probe = Mock(return_value=[in_half_precision, second])
        step = Step(
            f"{SKIP}=auto", f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.max_model_len=70"
        )
        step.trainer._model_config = LlamaConfig()
        step.workers.probe_neighbours = probe
        step.trainer._load_checkpoint()
        assert step.trainer._skips == leaves_out
        probe.assert_called_once_with(UPDATE, 70, 0.7)


def test_a_base_whose_tokens_differ_is_refused(monkeypatch):
    """An estimator of one's own: those of verl that do are refused at the start."""

    def by_token(token_level_rewards, **_):
        return token_level_rewards, token_level_rewards

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "by_token", by_token)
    with pytest.raises(ValueError, match="by_token"):
        Step(f"{BASE}=by_token").run()


def test_an_answer_that_a_tool_interrupts_is_none():
    step = Step()
    step.rows["a_1_0"] |= row_of("Two?", (r"I say \boxed{3", "tool", "} or so<end>"), 0.0)
    assert uneven(step.run()) == INCORRECT - {"a_1_0"} and len(step.workers.own) == 2
    assert step.metrics["grail/answer_found_rate"] == 4 / 6


class TestStart:
    """What the trainer takes from the model's folder, and the workers that it starts."""

    @pytest.mark.parametrize(("max_model_len", "context"), [("null", 48), ("32", 32)])
    def test_the_context_and_the_end_tokens(self, tmp_path, max_model_len, context):
        """verl's server takes the model's positions where rollout.max_model_len is unset; options of the model count."""
        build_tokenizer().save_pretrained(tmp_path)
        # vLLM ends a response at these, too.
        GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
        trainer = self._trainer(
            tmp_path,
            f"{ROLLOUT}.max_model_len={max_model_len}",
            f"+{MODEL}.override_config.max_position_embeddings=48",
        )
        trainer._init_tokenizer()
        assert trainer._context_length == context
        assert trainer._end_tokens == {3, 4, trainer.tokenizer.eos_token_id}

    def test_a_tokenizer_that_loses_text_ends_the_run(self, tmp_path):
        """One that the driver could not look at, as it was not there yet."""
        folder = save_as_llamas(build_tokenizer(), tmp_path / "model")
        with pytest.raises(ValueError, match="tokenizer"):
            self._trainer(folder)._init_tokenizer()

    def _trainer(self, folder: Path, *overrides: str):
        model = LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=64)
        model.save_pretrained(folder)
        attention = f"++{MODEL}.override_config.attn_implementation=sdpa"
        return Step(f"{MODEL}.path={folder}", attention, *overrides).trainer

    @pytest.mark.parametrize(
        ("strategy", "replaced"), [("megatron", False), ("fsdp2", True)]
    )
    def test_workers_of_other_engines_are_verls_own(self, strategy, replaced, monkeypatch):
        def init_resource_pool_mgr(self):
            self.role_worker_mapping = {Role.ActorRollout: ActorRolloutRefWorker}

        monkeypatch.setattr(
            PPOTrainerSync, "_init_resource_pool_mgr", init_resource_pool_mgr
        )
        monkeypatch.setattr(host, "ray", SimpleNamespace(remote=lambda worker: worker))
        trainer = Step(f"{ACTOR}.strategy={strategy}").trainer
        trainer._init_resource_pool_mgr()
        expected = host.TokenWeightActorWorker if replaced else ActorRolloutRefWorker
        assert trainer.role_worker_mapping == {Role.ActorRollout: expected}


TRUNCATED = {
    "vllm 100 1": "abc<end> abcde<end> abcde abc abcdeg! abcdef abfcde! abfcd<end> abfcf",
    "vllm 100 5": "abcd!",
    "sglang 100 5": "abc",
    "vllm 8 5": "abc! ab<end>",
    "trtllm 8 5": "ab",
    "vllm 6 1": "abfcd! abfc abfcf",
    "sglang 8 5": "ab! a",
    "sglang 9 5": "abc!",
    "sglang 6 5": "!",
    "vllm 5 5": "a!",
}
"""By the engine, the length of the context and that of the prompt: responses, of which those with ``!`` are truncated."""


@pytest.mark.parametrize("case", TRUNCATED)
def test_what_is_truncated(case):
    """Of responses of at most 6 tokens to prompts of at most 3; ``f`` ends a turn as ``<end>`` does, and a tool wrote cd after
    it. SGLang has one position less."""
    # Such as vLLM, a context of 100 tokens and a prompt of one.
    engine, context, prompt = case.split()
    texts = TRUNCATED[case].split()
    rollout = {"name": engine, "prompt_length": 3, "response_length": 6}
    plain = {
        "actor_rollout_ref": {"rollout": rollout},
        "algorithm": {"adv_estimator": "grail"},
    }
    settings = Settings.parse(OmegaConf.create(plain))
    end_tokens = {END_ID, encode("f")[0]}
    responses = [torch.tensor(encode(text.removesuffix("!"))) for text in texts]
    truncated_B = truncated(
        [torch.arange(int(prompt))] * len(responses),
        responses,
        settings,
        int(context),
        end_tokens,
    )
    assert truncated_B.tolist() == [text.endswith("!") for text in texts]


def test_a_group_meets_on_a_rank_and_copies_that_fill_one_up_belong_to_none():
    """Of two ranks: the first gets the responses 0 and 2, the other one response 1 and a copy."""
    requests = []

    def score(request):
        requests.extend(rows_of(request))
        scores = [torch.full((row.length,), float(row.index)) for row in requests]
        return build_reply(list(map(RowScores, scores)))

    step = Step(method=Shear())
    step.workers.compute_token_scores = score
    step.workers._dispatch_info = {"actor": [0, 1]}
    rows = [
        Row(torch.arange(4 + i), 2, 2 + i, None, 1.0, group, i)
        for i, group in enumerate((0, 1, 0))
    ]
    scores = [
        row_scores.scores.tolist() for row_scores in step.trainer.scores(Shear(), rows)
    ]
    assert scores == [[0.0] * 2, [1.0] * 3, [2.0] * 4]
    assert [{row.group for row in share} for share in (requests[:2], requests[2:])] == [
        {0},
        {1, -1},
    ]
