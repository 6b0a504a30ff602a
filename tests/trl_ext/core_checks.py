"""Token weights in TRL: training, refusals, and what is relied on of TRL's source; run by test_trl.py with the oldest and
the newest TRL on the path."""

import inspect
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from grail_advantage import Grail, Method, TokenWeights, compute_token_weights, processes
from grail_advantage.analyze.methods import parse_method
from grail_advantage.data import LARGEST, Example
from grail_advantage.dump import read_dump
from grail_advantage.method import build as method_of
from grail_advantage.rules import check_rules
from grail_advantage.trl_ext import TokenWeightGRPOTrainer, rules
from grail_advantage.trl_ext.rules import LOSSES, OVERRIDDEN, Arguments
from grail_advantage.weigh import weigh
from recipe.published import trl_arguments
from tests.core.common import watch_inputs
from tests.core.tiny_models import END, PAD, Family, Rollout, char_tokenizer, make_batch
from tests.trl_ext import world
from tests.trl_ext.world import (
    MICRO,
    build,
    generation_batch,
    mismatches,
    new_model,
    parameters,
    trained,
)
from tests.unjudged import UNJUDGED

WHOLE = {"token_weights": "uniform", "token_weight_options": {"mask_truncated": False}}
ADAPTER = LoraConfig(
    task_type="CAUSAL_LM",
    r=4,
    target_modules=["q_proj", "v_proj"],
    # Its values are drawn, so that it changes the policy.
    init_lora_weights=False,
)
assert_close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)


def stock_and_uniform(folder: Path, **settings) -> list[Tensor]:
    """The parameters after a training by TRL's trainer, and by the uniform method."""
    ends = []
    for kind, weights in ((GRPOTrainer, {}), (TokenWeightGRPOTrainer, WHOLE)):
        # An adapter's values are drawn.
        torch.manual_seed(0)
        ends.append(parameters(trained(folder, kind, **weights, **settings).model))
    return ends


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": loss, "scale_rewards": "none"} for loss in LOSSES),
        {
            "scale_rewards": "batch",
            "mask_truncated_completions": True,
            "gradient_checkpointing": True,
        },
        {"bf16": True, "scale_rewards": "group"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_uniform_trains_as_the_stock_trainer(tmp_path, options):
    """Bit for bit: 4 updates, of 4 micro-batches of 2, by a generation batch that is used twice."""
    # A large step, so that a difference of advantages shows in the parameters.
    settings = {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.3, **MICRO}
    ends = stock_and_uniform(tmp_path, **settings | options)
    assert torch.equal(*ends)
    assert not torch.allclose(ends[0], parameters(new_model()), atol=1e-3)


RESPONSES = [script for scripts in world.TEXTS.values() for script in scripts]
ADVANTAGES = [-0.25, -0.25, 0.75, -0.25, 0.5, -0.5, 0.5, -0.5]
"""Of the responses: reward minus the group's mean."""


def plain_weights(
    method: Method, model=None, prompt: str = "{}", **options
) -> tuple[TokenWeights, Tensor]:
    """The script's responses by :func:`compute_token_weights`, on other padding than TRL's; their token advantages. One
    that is cut off is masked."""
    rollouts = []
    for place, script in enumerate(RESPONSES):
        text = prompt.format(list(world.TEXTS)[place // world.GENERATIONS])
        response = script.turns[0] + END * script.ends
        # One that does not end has the advantage 0, as both hosts mask truncated responses.
        rollouts.append(Rollout(text, response, ADVANTAGES[place] * script.ends))
    batch = make_batch(rollouts, "right")
    arguments = (model or new_model(), char_tokenizer(), *batch.tensors(), method)
    result = compute_token_weights(*arguments, temperature=world.TEMPERATURE, **options)
    return result, result.advantages[batch.response_mask.bool()]


def of_responses(trainer: GRPOTrainer) -> Tensor:
    """All token advantages of a batch of TRL's, one response after the other."""
    batch = generation_batch(trainer)
    return batch["advantages"][batch["completion_mask"].bool()]


def test_bf16_is_accelerates_autocast(tmp_path):
    """Which is within the prepared model's forward: advantages are those of float32 but for its rounding."""
    advantages = []
    # The second run moves the files of the first into a folder beside.
    for bf16 in (False, True):
        method = Grail(gate="all")
        trained(tmp_path / "run", token_weights=method, token_dump=tmp_path, bf16=bf16)
        advantages.append(np.concatenate([row.advantage_T for row in read_dump(tmp_path)]))
    exact, half = advantages
    assert 1e-4 < np.linalg.norm(half - exact) / np.linalg.norm(exact) < 0.1


UNUSABLE = {
    # Of the responses of the second prompt: a second function's rewards; the first one's are the script's.
    "its weighted sum is too large": (
        [0.0, 1e17, 0.0, 0.0],
        {"reward_weights": [1.0, 100.0]},
    ),
    "a group of both signs": ([torch.inf, -torch.inf] * 2, {"scale_rewards": "group"}),
    "normalised apart": (
        [0.0, -torch.inf, 0.0, 0.0],
        {"multi_objective_aggregation": "normalize_then_sum"},
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_reward_that_cannot_be_used_trains_nothing(tmp_path, case):
    """The update is that without these responses: no reward function scores them, TRL's ``None``."""
    values, options = UNUSABLE[case]
    rewards = np.array([[script.outcome for script in RESPONSES], [0.0] * 4 + values])
    unusable = np.abs(rewards[1]) >= 1e17
    # What TRL has for a response that no function judges.
    nothing = np.where(unusable, None, rewards)
    trainers = []
    for name, table in (("known", rewards), ("none", nothing)):
        options["reward_funcs"] = [
            lambda *, column=column, **_: column for column in table.tolist()
        ]
        trainers.append(trained(tmp_path, token_dump=tmp_path / name, **options))
    models = [parameters(trainer.model) for trainer in trainers]
    assert torch.equal(*models)
    assert not torch.equal(models[0], parameters(new_model())), "the other responses train"
    figures = trainers[0].state.log_history[0]
    assert figures["grail/unjudged_rate"] == unusable.mean()
    for row, is_unusable in zip(read_dump(tmp_path / "known"), unusable, strict=True):
        if is_unusable:
            assert row.outcome is None or abs(row.reward) > LARGEST
            assert not row.advantage_T.any()


@pytest.mark.parametrize("name", UNJUDGED)
def test_the_others_are_compared_without_a_reward_that_cannot_be_used(tmp_path, name):
    rewards, expected = UNJUDGED[name]
    # The second prompt has usable rewards alone; its responses are the last four.
    rewards = [*rewards, 1.0, 0.0, 1.0, 0.0]
    trainer = build(tmp_path, reward_funcs=lambda **_: rewards, **WHOLE)
    batch = generation_batch(trainer)
    expected_B1 = torch.tensor(expected).nan_to_num(0.0)[:, None]
    mask_BT = batch["completion_mask"][:4]
    torch.testing.assert_close(batch["advantages"][:4], expected_B1 * mask_BT)


def test_the_mean_of_the_runs_loss(tmp_path, monkeypatch):
    """Which a method's threshold is compared with, of two responses: 1 2 and 4."""
    rollouts = []
    monkeypatch.setattr(
        processes, "weigh", lambda r, *rest: rollouts.append(r) or weigh(r, *rest)
    )
    trainer = build(tmp_path, token_weights="uniform")
    values_BT = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    # The mean of 3 / 2 and 4; 7 over both and the longest length, not the batch's width; 7 over three tokens.
    longest = trainer.args.max_completion_length
    expected = {"grpo": 11 / 4, "sapo": 11 / 4, "dr_grpo": 7 / 2 / longest}
    for trainer.loss_type in LOSSES:
        generation_batch(trainer)
        mean = rollouts[-1].mean(values_BT, mask_BT)
        assert mean == pytest.approx(expected.get(trainer.loss_type, 7 / 3), rel=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "tools"), [*((loss, False) for loss in LOSSES), ("bnpo", True)]
)
def test_the_update_is_the_same_without_zero_advantage_responses(
    tmp_path, loss_type, tools
):
    """Of micro-batches that hold some, none and only such responses, of which one always stays. The probe draws nothing
    that the run misses, and is made once. Where a loss is divided by a micro-batch's tokens, a tool's do not count."""
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "loss_type": loss_type,
        "num_iterations": 2,
        "max_steps": 4,
        "learning_rate": 0.3,
        "max_grad_norm": 0.0,
        "scale_rewards": "group" if loss_type == "cispo" else "none",
        # The third response of the first prompt alone is better than its siblings.
        "reward_funcs": lambda **_: [0.0, 0.0, 1.0] + [0.0] * 5,
        "tools": [world.GAME.guess] if tools else None,
        "token_weights": "uniform",
    }
    moved = []
    rows = []
    states = []
    for skip in (False, True):
        # Conversations have a model and data of their own.
        settings = world.talks() | options if tools else options
        trainer = build(tmp_path, skip_zero_advantage=skip, **settings)
        start = parameters(trainer.model).clone()
        # Each pass through the model shows its number of responses.
        with watch_inputs(trainer.model.model.layers[0]) as shapes:
            trainer.train()
        rows.append([shape[0] for shape in shapes])
        states.append(torch.get_rng_state())
        moved.append(parameters(trainer.model) - start)
    largest = float(moved[0].abs().max())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-4 * largest)
    assert largest > 1e-3
    # The probe has 7 passes, with 9 rows more.
    assert len(rows[1]) == len(rows[0]) + 7 and sum(rows[1]) - 9 < sum(rows[0])
    assert torch.equal(*states)


def mixing():
    """Each response also gets some of the others."""
    model = new_model()
    model.model.layers[1].register_forward_hook(
        lambda *values: values[-1] + 0.1 * values[-1].mean(dim=0, keepdim=True)
    )
    return model


DEPENDING = {
    "dropout": lambda: new_model(attention_dropout=0.1),
    "LoRA's dropout": lambda: get_peft_model(
        new_model(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    ),
    "rows that see each other": mixing,
}


@pytest.mark.parametrize(
    ("name", "skip", "size"),
    [*((name, True, 4) for name in DEPENDING), ("dropout", True, 1), ("dropout", False, 4)],
)
def test_a_model_whose_responses_depend_on_others_or_chance_skips_nothing(
    tmp_path, name, skip, size
):
    """It is refused before the first update; TRL's own training, and a micro-batch of one response, which has no
    neighbour, go on."""
    is_refused = skip and size > 1
    trainer = build(
        tmp_path,
        model=DEPENDING[name](),
        token_weights="uniform",
        skip_zero_advantage=skip,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
    )
    start = parameters(trainer.model).clone()
    refusal = pytest.raises(ValueError, match="skip_zero_advantage")
    with refusal if is_refused else nullcontext():
        trainer.train()
    assert torch.equal(start, parameters(trainer.model)) == is_refused


def test_virtual_tokens_are_refused_where_they_would_shift_scores(tmp_path):
    """And train as in TRL's own trainer where a method has no pass."""
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    # Scores of three tokens more than the response has would be shifted by three.
    trainer = build(tmp_path, token_weights=Grail(gate="all"), peft_config=adapter)
    with pytest.raises(ValueError, match="virtual tokens"):
        generation_batch(trainer)
    assert torch.equal(*stock_and_uniform(tmp_path, peft_config=adapter))


def test_a_pass_takes_no_more_tokens_than_the_updates_micro_batch(tmp_path):
    """And more responses than one together."""
    trainer = build(
        tmp_path,
        token_weights=Grail(gate="all", span="last"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    for _ in range(2):  # at first the model is asked how it computes
        with watch_inputs(trainer.model.model.embed_tokens) as shapes:
            batch = generation_batch(trainer)
    # Two responses in TRL's padding is what an update takes at once.
    width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    assert sum(rows for rows, _ in shapes) == 4 and max(rows for rows, _ in shapes) > 1
    assert max(rows * length for rows, length in shapes) <= 2 * width


def test_figures_stand_in_the_logs_and_the_table_keeps_its_advantages(tmp_path):
    trainer = trained(tmp_path, log_completions=True)
    figures = trainer.state.log_history[0]
    for name, value in plain_weights(Grail())[0].stats.items():
        assert figures[f"grail/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert figures["grail/truncated_rate"] == 1 / 8 and figures["grail/seconds"] > 0
    assert list(trainer._logs["advantages"]) == pytest.approx(ADVANTAGES)
    # In evaluation TRL reads one advantage a response.
    trainer.model.eval()
    assert generation_batch(trainer)["advantages"].shape == (8,)


def test_every_step_is_weighed_by_its_number(tmp_path):
    """Whose control deals the same weights out anew in each."""
    method = Grail(control="shuffled")
    trainer = build(tmp_path, token_weights=method)
    by_step = []
    for trainer.state.global_step in (1, 2):
        by_step.append(of_responses(trainer))
        expected = plain_weights(method, step=trainer.state.global_step)[1]
        assert_close(by_step[-1], expected)
    assert not torch.allclose(*by_step)


def test_a_response_that_ends_in_padding_is_as_little_truncated_as_for_trl(tmp_path):
    """Of a model whose padding token is not its end token."""
    scripts = {
        prompt: [
            script if script.ends else script._replace(turns=[script.turns[0] + PAD])
            for script in of_prompt
        ]
        for prompt, of_prompt in world.TEXTS.items()
    }
    # TRL counts a last token that is the end or the padding token as an end.
    figures = trained(tmp_path, scripts=scripts).state.log_history[0]
    assert figures["grail/truncated_rate"] == figures["completions/clipped_ratio"] == 0


def test_an_adapter_is_part_of_the_policy(tmp_path):
    """Token advantages are those of the model that it is merged into, and of the answer's format; it alone is trained."""
    torch.manual_seed(0)
    method = Grail("robust", gate="all", leaf="middle")
    answer = r" (?P<content>six|say|or)"
    trainer = build(
        tmp_path,
        token_weights=method,
        peft_config=ADAPTER,
        answer=answer,
        gradient_checkpointing=True,
        max_steps=2,
        learning_rate=0.5,
    )
    advantages = of_responses(trainer)
    assert all(p.grad is None for p in trainer.model.parameters())
    start = {name: values.clone() for name, values in trainer.model.state_dict().items()}
    trainer.train()
    adapted = dict(trainer.model.named_parameters())
    moved = {
        name for name, values in adapted.items() if not torch.equal(values, start[name])
    }
    assert moved and all(adapted[name].requires_grad for name in moved)
    # Two steps at a rate of 0.5 have moved the adapter.
    # Back to the policy that was scored.
    trainer.model.load_state_dict(start, strict=False)
    merged = trainer.model.merge_and_unload().eval()
    assert_close(advantages, plain_weights(method, merged, answer=answer)[1])
    without = plain_weights(method, answer=answer)[1]
    assert not torch.allclose(advantages, without, atol=0.02)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_reference_is_the_model_without_its_adapter(tmp_path, beta):
    """By TRL's forward with a KL term, else by this package's; in a whole training, whose receipt finds nothing."""
    method = method_of("progress_advantage", {"lam": 0.25})
    settings = {"token_weights": method, "peft_config": ADAPTER, "beta": beta}
    trainer = build(tmp_path, **settings)
    advantages = of_responses(trainer)
    cut_off = torch.tensor([not script.ends for script in RESPONSES])
    assert_close(advantages, plain_weights(method, trainer.model, masked=cut_off)[1])
    assert not torch.allclose(advantages, plain_weights(method_of("uniform"))[1], atol=0.02)
    folder = tmp_path / "tokens"
    trained(tmp_path, token_dump=folder, max_steps=2, learning_rate=0.1, **settings)
    for row in read_dump(folder):
        signal = row.old_log_prob_T - row.ref_log_prob_T
        # lam 0.25: a quarter of the advantage, three of the log-ratio to the reference.
        mixed = 0.25 * row.base_advantage_T + 0.75 * signal
        np.testing.assert_allclose(
            row.advantage_T, 0 * mixed if row.truncated else mixed, atol=1e-5
        )
    assert mismatches(folder) == [[], []]


def test_rlsd_reads_the_other_columns(tmp_path):
    method = method_of("rlsd", {"privileged_column": "solution"})
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "user: {{ messages[0]['content'] }} {{ 'assistant: ' if add_generation_prompt }}"
    )
    data = world.chats(*world.TEXTS, solution="five or nine, as 2 + 3")
    trainer = build(
        tmp_path, train_dataset=data, processing_class=tokenizer, token_weights=method
    )
    examples = [
        Example(row["prompt"], {"solution": row["solution"]}, {})
        for row in data
        for _ in range(4)
    ]
    result, expected = plain_weights(
        method, prompt="user: {} assistant: ", examples=examples
    )
    # Otherwise rlsd reads no column.
    assert result.stats["weight_deviation"] > 0.01
    assert_close(of_responses(trainer), expected)


REFUSED = {
    "rlsd asks again without the tools": {"tools": [print], "token_weights": "rlsd"},
    "rlsd asks again without what a rollout_func adds": {
        "rollout_func": print,
        "token_weights": "rlsd",
    },
    "what others wrote would train": {"rollout_func": print, "tools": [print]},
    "images": {"train_dataset": {"prompt": ["a"], "image": ["b"]}},
    "one ratio a response, by the loss": {"loss_type": "luspo"},
    "one ratio a response": {"importance_sampling_level": "sequence"},
    "turns read rewards as they are": {
        "multi_objective_aggregation": "normalize_then_sum",
        "token_weights": "turn_rloo",
    },
    "turns are divided by no deviation": {
        "scale_rewards": "batch",
        "token_weights": "turn_rloo",
    },
    "turns have a deviation of their own": {
        "scale_rewards": "none",
        "token_weights": "turn_grpo:gamma=1",
    },
    "nothing computes the reference": {"beta": 0.0, "token_weights": "progress_advantage"},
    "temperature 0": {"temperature": 0.0},
    "a temperature that is no number": {"temperature": float("nan")},
    "fp16": {"fp16": True},
    "the model is sharded": {"fsdp": "full_shard"},
    "responses to a prompt on two processes": {
        "per_device_train_batch_size": 2,
        "token_weights": "shear",
        "steps_per_generation": 3,
    },
    # Against leaving responses out.
    "a KL term": {"beta": 0.1},
    "an entropy bonus": {"entropy_coef": 0.01},
    "an adaptive entropy bonus": {"use_adaptive_entropy": True},
    "a quantile over all tokens": {"top_entropy_quantile": 0.5},
    "noise in the embeddings": {"neftune_noise_alpha": 0.1},
    "a router's loss": {"router_aux_loss_coef": 0.1, "aux_loss_enabled": True},
}
WARNED = {
    "a penalty for responses that are masked": {
        "reward_funcs": [get_soft_overlong_punishment(80, 40)]
    },
    "discounted turns": {"token_weights": "turn_grpo"},
    "masked turns": {"mask_truncated_completions": True, "token_weights": "turn_rloo"},
    "turns that the method masks": {"token_weights": "turn_rloo:mask_truncated=true"},
    "turns divided by their tokens": {"loss_type": "dapo", "token_weights": "turn_rloo"},
    "turns in several iterations": {"num_iterations": 2, "token_weights": "turn_rloo"},
    "turns in several updates": {"steps_per_generation": 2, "token_weights": "turn_rloo"},
}
OF_METHOD = {
    "discounted turns": "turn_grpo.gamma",
    "turns that the method masks": "turn_rloo.mask_truncated",
}
"""Options of methods; the others are the first of each example, TRL's own."""
EXAMPLES = REFUSED | WARNED


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Makes those of a trainer with other settings than its own: this machine cannot start all of them."""
    trainer = build(
        tmp_path_factory.mktemp("rules"), loss_type="dr_grpo", scale_rewards="group"
    )

    def changed(**example):
        method = parse_method(example.get("token_weights", "grail"))
        args = copy(trainer.args)
        # A copy, as the examples share the trainer.
        stand_in = copy(trainer)
        stand_in.args = args
        stand_in.is_fsdp_enabled = "fsdp" in example
        stand_in.accelerator = SimpleNamespace(
            # Groups are split only where there are two processes.
            num_processes=2 if method.whole_groups else 1,
            state=trainer.accelerator.state,
            parallelism_config=None,
        )
        for name, value in example.items():
            # TRL keeps names of the functions.
            if name == "reward_funcs":
                stand_in.reward_func_names = [function.__name__ for function in value]
            if name == "train_dataset":
                value = SimpleNamespace(column_names=list(value))
            setattr(args if hasattr(args, name) else stand_in, name, value)
        return Arguments(stand_in, method)

    return changed


ALL_RULES = (*rules.RULES, *rules.AGAINST_SKIPPING)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_setting_breaks_its_rule_alone(name, arguments):
    """And is named by TRL's own option, or the method's."""
    settings = arguments(**EXAMPLES[name])
    # One rule and no other.
    (rule,) = (rule for rule in ALL_RULES if rule.when(settings))
    option = OF_METHOD.get(name, next(iter(EXAMPLES[name])))
    names = {
        *inspect.signature(GRPOConfig).parameters,
        *inspect.signature(GRPOTrainer).parameters,
    }
    assert option in names or name in OF_METHOD
    assert rule.warned == (name in WARNED)
    # A warning names the option as a refusal does.
    with pytest.raises(ValueError, match=f"^{option}="):
        check_rules([replace(rule, warned=False)], settings)


def test_every_rule_has_an_example(arguments):
    """So that a rule that goes leaves an example that nothing refuses, or warns of; the trainer itself breaks none."""
    examples = [arguments(**example) for example in EXAMPLES.values()]
    assert all(any(rule.when(settings) for settings in examples) for rule in ALL_RULES)
    assert not any(rule.when(arguments()) for rule in ALL_RULES)


def test_no_response_is_left_out_of_the_loss_of_a_router(tmp_path):
    """Which every response trains."""
    router = Family("qwen3_moe", {"output_router_logits": True})
    model = router.build(vocab_size=len(world.PIECES), max_position_embeddings=4096)
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        build(tmp_path, model=model, token_weights="uniform", skip_zero_advantage=True)


def test_options_are_refused_as_a_trainer_is_made(tmp_path):
    """And the published ones mean an update of 256 responses with any number of processes."""
    for option, settings in (
        ("loss_type", {"loss_type": "luspo"}),
        ("entropy_coef", {"skip_zero_advantage": True, "entropy_coef": 0.01}),
        (r"^token_dump\.every=10\.0", {"token_dump": {"folder": "tokens", "every": 10.0}}),
        ("rows", {"token_dump": {"folder": "tokens", "rows": 4}}),
    ):
        with pytest.raises(ValueError, match=option):
            build(tmp_path, **settings)
    settings = world.WORLD["settings"] | trl_arguments(processes=1)
    published = GRPOConfig(str(tmp_path), **settings)
    assert published.generation_batch_size == 256 and published.num_iterations == 4


def test_another_trl(tmp_path, monkeypatch, caplog):
    """A newer one is warned of; refused is one without an overridden method, or with other advantages in its loss."""
    for name, texts in world.WORLD["relied_on"].items():
        # Texts without which an override does something else than it says.
        source = inspect.getsource(getattr(GRPOTrainer, name))
        assert not [text for text in texts if text not in source], name
    rules.check_version(trl.__version__)
    assert not caplog.messages
    # Newer than any that was tested.
    rules.check_version("99.0")
    assert "99.0" in caplog.text

    class Later(TokenWeightGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return GRPOTrainer._generate_and_score_completions(self, inputs)

    with pytest.raises(RuntimeError, match="advantages"):
        trained(tmp_path, Later)
    monkeypatch.delattr(GRPOTrainer, OVERRIDDEN[0])
    with pytest.raises(ValueError, match=OVERRIDDEN[0]):
        rules.check_version("99.0")
