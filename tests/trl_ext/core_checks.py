"""Token weights in TRL; run by test_trl.py with the oldest and the newest TRL on the path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers.integrations.neftune import activate_neftune
from trl import GRPOTrainer

from grail_advantage import Grail, Method, TokenWeights, compute_token_weights
from grail_advantage.data import LARGEST, Example
from grail_advantage.dump import read_dump
from grail_advantage.method import build as method_of
from grail_advantage.trl_ext import trainer as trainer_module
from grail_advantage.trl_ext.rules import LOSSES
from grail_advantage.weigh import weigh
from tests.core.common import watch_inputs
from tests.core.tiny_models import char_tokenizer, make_batch, tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import MICRO, Stock, build, generation_batch, parameters, response_values

CHATML = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
WHOLE: dict[str, Any] = {"token_weights": "uniform", "token_weight_options": {"mask_truncated": False}}


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": loss, "scale_rewards": "none"} for loss in LOSSES),
        {"scale_rewards": "batch", "mask_truncated_completions": True, "gradient_checkpointing": True},
        {"bf16": True, "scale_rewards": "group"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_uniform_trains_as_the_stock_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Bit for bit: 8 updates of 4 micro-batches of 2, for each of two generation batches, which is used twice."""
    found = []
    for trainer_class, weights in ((Stock, {}), (scripted.ScriptedTokenWeights, WHOLE)):
        settings = {"num_iterations": 2, "max_steps": 8, "learning_rate": 0.3, **MICRO, **options}
        trainer = build(tmp_path / "run", trainer_class, weights=weights, **settings)
        trainer.train()
        found.append(parameters(trainer.model))
    assert torch.equal(*found)
    assert not torch.allclose(found[0], parameters(tiny_model()), atol=1e-3)


def plain_weights(
    method: Method, *, model: Any = None, prompt: str = "{}", **known: Any
) -> tuple[TokenWeights, torch.Tensor]:
    """The script's responses by :func:`compute_token_weights`, on other padding than TRL's; their token advantages."""
    rows = scripted.rollouts()
    batch = make_batch([replace(row, prompt=prompt.format(row.prompt)) for row in rows], "right")
    given = (model or tiny_model(), char_tokenizer(), *batch.tensors(), method)
    found = compute_token_weights(*given, temperature=scripted.TEMPERATURE, **known)
    return found, torch.cat(response_values(found.advantages, batch.response_mask))


def of_responses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All token advantages of a batch of TRL's, one response after the other."""
    return torch.cat(response_values(batch["advantages"], batch["completion_mask"]))


def test_bf16_is_accelerates_autocast(tmp_path: Path) -> None:
    """Which is within the prepared model's forward: advantages are those of float32 but for its rounding."""
    found = []
    for name, bf16 in (("exact", False), ("half", True)):
        weights = {"token_weights": Grail(gate="all"), "token_dump": tmp_path / name}
        build(tmp_path, weights=weights, bf16=bf16, max_steps=1).train()
        found.append(np.concatenate([row.advantage_T for row in read_dump(tmp_path / name)]))
    assert 1e-4 < np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]) < 0.1


UNUSABLE: dict[str, tuple[list[float | None], dict[str, Any]]] = {
    # Of the responses of the second prompt: a second function's rewards; the first one's are the script's.
    "its weighted sum is too large": ([0.0, 1e17, 0.0, 0.0], {"reward_weights": [1.0, 100.0]}),
    "a group of both signs": ([torch.inf, -torch.inf] * 2, {"scale_rewards": "group"}),
    "normalised apart": ([0.0, -torch.inf, 0.0, 0.0], {"multi_objective_aggregation": "normalize_then_sum"}),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_reward_that_cannot_be_used_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The update is that without these responses: no reward function scores them, TRL's ``None``."""
    values, options = UNUSABLE[case]
    of_script = [reward for answers in scripted.GROUPS.values() for _, reward in answers]
    unusable = [abs(value) >= 1e17 for value in values]

    def trained(others: list[float | None], known: list[bool], folder: Path) -> GRPOTrainer:
        first = [reward if of else None for reward, of in zip(of_script, [True] * 4 + known, strict=True)]
        monkeypatch.setattr(scripted, "reward", [lambda **_: first, lambda **_: [0.0] * 4 + others])
        trainer = build(tmp_path, weights={"token_weights": "grail", "token_dump": folder}, max_steps=1, **options)
        trainer.train()
        return trainer

    trainer = trained(values, [True] * 4, tmp_path / "tokens")
    without = [None if bad else value for value, bad in zip(values, unusable, strict=True)]
    expected = trained(without, [not bad for bad in unusable], tmp_path / "others")
    assert torch.equal(parameters(trainer.model), parameters(expected.model))
    assert not torch.equal(parameters(trainer.model), parameters(tiny_model())), "the other responses train"
    assert logged(trainer)["grail/unjudged_rate"] == pytest.approx(sum(unusable) / 8)
    rows = list(read_dump(tmp_path / "tokens"))[scripted.GENERATIONS :]
    for row, bad in zip(rows, unusable, strict=True):
        assert not bad or ((row.outcome is None or abs(row.reward) > LARGEST) and not row.advantage_T.any())


def logged(trainer: GRPOTrainer) -> dict[str, float]:
    """The figures of the first step."""
    return next(entry for entry in trainer.state.log_history if "grail/selected_rate" in entry)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_mean_of_the_runs_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:
    """Which a method's threshold is compared with. dr_grpo divides by the longest length, not by the batch's width."""
    trainer = build(tmp_path, weights={"token_weights": "uniform"}, loss_type=loss_type)
    values_BT = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    expected = {"grpo": 11 / 4, "sapo": 11 / 4, "dr_grpo": 7 / 2 / trainer.args.max_completion_length}
    kept = []
    monkeypatch.setattr(trainer_module, "weigh", lambda host, *rest: kept.append(host.rollouts()) or weigh(host, *rest))
    generation_batch(trainer)
    assert kept[0].mean(values_BT, mask_BT) == pytest.approx(expected.get(loss_type, 7 / 3), rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_update_is_the_same_without_zero_advantage_responses(tmp_path: Path, loss_type: str) -> None:
    """Of micro-batches that hold some, none and only such responses, of which one always stays. The probe draws nothing
    that the run misses, and is made once."""
    moved, seen, states, zeros = [], [], [], set()
    scale = "group" if loss_type == "cispo" else "none"
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "loss_type": loss_type}

    class Recording(scripted.ScriptedTokenWeights):
        def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
            rewards = super()._calculate_rewards(*arguments, **named)
            rewards[scripted.GENERATIONS :] = 0.0  # the second prompt's
            return rewards

        def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            zeros.add(int((inputs["advantages"] == 0).all(dim=1).sum()))
            loss = super()._compute_loss(model, inputs)
            states.append(torch.get_rng_state())
            return loss

    for skip in (False, True):
        weights = {"token_weights": "uniform", "skip_zero_advantage": skip}
        options = {"scale_rewards": scale, "learning_rate": 0.3, "num_iterations": 2, "max_steps": 4}
        trainer = build(tmp_path, Recording, weights=weights, **sizes, **options)
        trainer.args.max_grad_norm = 0.0
        with watch_inputs(trainer.model.model.layers[0]) as shapes:
            trainer.train()
        seen.append([of[0] for of in shapes])
        moved.append(parameters(trainer.model) - parameters(tiny_model()))
    largest = float(moved[0].abs().max())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-4 * largest)
    assert largest > 1e-3 and len(zeros) > 1
    assert len(seen[1]) == len(seen[0]) + 6 and sum(seen[1]) - (3 * 1 + 4 + 2 * 1) < sum(seen[0])
    assert all(map(torch.equal, states[: len(states) // 2], states[len(states) // 2 :]))


def noisy(model: Any) -> Any:
    activate_neftune(model, 5)
    return model


def mixing(model: Any) -> Any:
    """Each response also gets some of the others."""
    model.model.layers[1].register_forward_hook(lambda *of: of[-1] + 0.1 * of[-1].mean(dim=0, keepdim=True))
    return model


DEPENDING = {
    "dropout": lambda: tiny_model(attention_dropout=0.1),
    "NEFTune": lambda: noisy(tiny_model()),
    "LoRA's dropout": lambda: get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)),
    "rows that see each other": lambda: mixing(tiny_model()),
}


@pytest.mark.parametrize("name", DEPENDING)
def test_a_model_whose_responses_depend_on_others_or_chance_skips_nothing(tmp_path: Path, name: str) -> None:
    """It is refused before the first update; TRL's own training, and a micro-batch of one response, go on."""
    for skip, size in ((True, 4), (True, 1), (False, 4)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 1}
        weights = {"token_weights": "uniform", "skip_zero_advantage": skip}
        trainer = build(tmp_path, model=DEPENDING[name](), weights=weights, **sizes)
        before = parameters(trainer.model).clone()
        if skip and size > 1:
            with pytest.raises(ValueError, match="skip_zero_advantage"):
                trainer.train()
        else:
            trainer.train()
        assert torch.equal(before, parameters(trainer.model)) == (skip and size > 1)


def test_virtual_tokens_are_refused_where_they_would_shift_scores(tmp_path: Path) -> None:
    """And train as in TRL's own trainer where a method has no pass."""
    found, adapter = [], PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="virtual tokens"):
        generation_batch(build(tmp_path, weights={"token_weights": Grail(gate="all"), "peft_config": adapter}))
    for trainer_class, weights in ((Stock, {}), (scripted.ScriptedTokenWeights, WHOLE)):
        torch.manual_seed(0)
        trainer = build(tmp_path, trainer_class, weights={**weights, "peft_config": adapter}, max_steps=1)
        trainer.train()
        found.append(parameters(trainer.model))
    assert torch.equal(*found)


def test_weights_are_computed_once_a_generation_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And used in both iterations. A pass takes no more tokens together than the update's micro-batch, and more
    responses than one."""
    calls = []

    def counted(host: Any, *rest: Any) -> Any:
        with watch_inputs(trainer.model.model.embed_tokens) as shapes:
            found = weigh(host, *rest)
        calls.append((host.rollouts(), shapes))
        return found

    monkeypatch.setattr(trainer_module, "weigh", counted)
    weights = {"token_weights": Grail(gate="all", span="last")}
    trainer = build(tmp_path, weights=weights, num_iterations=2, max_steps=8, learning_rate=0.0, **MICRO)
    trainer.train()
    assert [of.step for of, _ in calls] == [0, 4]
    rollouts, shapes = calls[1]  # in the first the model is asked how it computes
    assert sum(rows for rows, _ in shapes) == 4 and max(rows for rows, _ in shapes) > 1
    assert max(rows * length for rows, length in shapes) <= 2 * rollouts.padded_length


def test_figures_stand_in_the_logs_and_the_table_keeps_its_advantages(tmp_path: Path) -> None:
    trainer = build(tmp_path, max_steps=1, log_completions=True)
    trainer.train()
    for name, value in plain_weights(Grail())[0].stats.items():
        assert logged(trainer)[f"grail/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert logged(trainer)["grail/truncated_rate"] == 1 / 8 and logged(trainer)["grail/seconds"] > 0
    advantages = [row.advantage for row in scripted.rollouts(mask_truncated=False)]
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages)
    trainer.model.eval()
    assert generation_batch(trainer)["advantages"].shape == (8,), "evaluation is not weighted"


def test_an_adapter_is_part_of_the_policy(tmp_path: Path) -> None:
    """Token advantages are those of the model that it is merged into, and of the answer's format; it alone is trained."""
    torch.manual_seed(0)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    method, answer = Grail("robust", gate="all", leaf="middle"), {"answer": r" (?P<content>six|say|or)"}
    weights = {"token_weights": method, "peft_config": adapter, **answer}
    trainer = build(tmp_path, weights=weights, gradient_checkpointing=True, max_steps=2, learning_rate=0.5)
    found = of_responses(generation_batch(trainer))
    assert all(p.grad is None for p in trainer.model.parameters())
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in trainer.model.named_parameters()}
    trainer.train()
    same = {name: torch.equal(p, before[name][1]) for name, p in trainer.model.named_parameters()}
    assert all(same[name] for name, (trains, _) in before.items() if not trains) and not all(same.values())
    for name, parameter in trainer.model.named_parameters():
        parameter.data.copy_(before[name][1])
    wanted = plain_weights(method, model=trainer.model.merge_and_unload().eval(), **answer)[1]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(found, plain_weights(method, **answer)[1], atol=0.02)


def test_rlsd_reads_the_other_columns(tmp_path: Path) -> None:
    method, tokenizer = method_of("rlsd", {"privileged_column": "solution"}), char_tokenizer()
    tokenizer.chat_template = CHATML
    chats, answers = [[{"role": "user", "content": prompt}] for prompt in scripted.GROUPS], ["five, as 2 + 3", "nine"]
    data = Dataset.from_dict({"prompt": chats, "solution": answers})
    batch = generation_batch(build(tmp_path, data=data, tokenizer=tokenizer, weights={"token_weights": method}))
    examples = [Example(chats[i // 4], {"solution": answers[i // 4]}, {}) for i in range(8)]
    expected, wanted = plain_weights(method, prompt="user: {} assistant: ", examples=examples)
    assert expected.stats["weight_deviation"] > 0.01
    torch.testing.assert_close(of_responses(batch), wanted, rtol=1e-3, atol=1e-3)
