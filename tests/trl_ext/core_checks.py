"""Token weights in TRL; run by test_trl.py with the oldest and the newest TRL on the path."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig
from transformers import ProcessorMixin
from trl import GRPOTrainer

from grail_advantage import GrailConfig, OarConfig, TokenWeights, compute_token_weights, register_signal
from grail_advantage.batch import Example
from grail_advantage.methods import method, methods
from grail_advantage.signals.base import Signal
from grail_advantage.trl_ext import TokenWeightGRPOTrainer, checks
from grail_advantage.trl_ext import trainer as trainer_module
from tests import documentation
from tests.core.tiny_models import Batch, char_tokenizer, make_batch, tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build, generation_batch, response_values

NO_CHANGE = method("uniform").build({"mask_truncated": False})
CHATML = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat_tokenizer() -> Any:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def plain_weights(signal: Signal, *, mask_truncated: bool = True, **known: Any) -> tuple[Batch, TokenWeights]:
    """The script's rows by :func:`compute_token_weights`, on other padding than TRL's."""
    batch = make_batch(scripted.rollouts(mask_truncated=mask_truncated), "right")
    settings = {"temperature": scripted.TEMPERATURE, **known}
    return batch, compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), signal, **settings)


def of_responses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All token advantages of a batch of TRL's, one row after the other."""
    return torch.cat(response_values(batch["advantages"], batch["completion_mask"]))


def parameters_gradient(trainer: GRPOTrainer, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    trainer.model.zero_grad()
    return loss.detach(), gradient


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_advantages_of_ones_equal_the_stock_loss(tmp_path: Path, loss_type: str) -> None:
    results = []
    for trainer_class, weights in (
        (GRPOTrainer, {}),
        (TokenWeightGRPOTrainer, {"token_weights": NO_CHANGE}),
    ):
        # Sampled, so that nothing of the test's own is in the way; any text has a reward.
        trainer = trainer_class(
            tiny_model(),
            lambda completions, **_: [float(sum(map(ord, text)) % 3) for text in completions],
            scripted.config(tmp_path, loss_type=loss_type, max_completion_length=6),
            train_dataset=scripted.prompts(),
            processing_class=char_tokenizer(),
            **weights,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        torch.manual_seed(1)
        batch = generation_batch(trainer)
        # Ratios that are not 1, so that the clipping matters.
        batch["old_per_token_logps"] = torch.linspace(-6, -3, batch["completion_ids"].numel()).view_as(
            batch["completion_ids"]
        )
        results.append((batch, *parameters_gradient(trainer, batch)))
    (stock, *of_stock), (ours, *of_ours) = results
    assert stock["advantages"].ndim == 1 and stock["advantages"].abs().sum() > 0
    assert torch.equal(ours["completion_ids"], stock["completion_ids"])
    expected_BT = stock["advantages"].unsqueeze(1) * stock["completion_mask"]
    assert torch.equal(ours["advantages"], expected_BT)
    assert torch.equal(of_ours[0], of_stock[0]) and torch.equal(of_ours[1], of_stock[1])
    assert of_stock[1].abs().sum() > 0


METHODS: dict[str, Signal] = {
    "grail": GrailConfig(),
    "grail, robust": GrailConfig("robust", gate="all"),
    "grail, hidden states": GrailConfig(leaf="middle", mask_truncated=False),
    "oar_g": OarConfig(),
    "oar_p": OarConfig("perturbation"),
    "surprisal": method("surprisal").build({"gate": "all", "reshaper": "power"}),
    "entropy": method("entropy").build({}),
    "high_entropy": method("high_entropy").build({}),
    "probability": method("probability").build({}),
    "stare": method("stare").build({"variant": "C2", "threshold": 100.0}),
    "shear": method("shear").build({"window": 6, "stride": 3}),
    "uniform": method("uniform").build({}),
}


@pytest.mark.parametrize("name", METHODS)
def test_token_advantages_are_those_of_compute_token_weights(tmp_path: Path, name: str) -> None:
    signal = METHODS[name]
    trainer = build(tmp_path, weights={"token_weights": signal})
    batch = generation_batch(trainer)

    groups = torch.arange(8) // scripted.GENERATIONS
    plain, expected = plain_weights(signal, mask_truncated=signal.mask_truncated, groups=groups)
    wanted = torch.cat(response_values(expected.weights * plain.advantages.unsqueeze(1), plain.response_mask))
    assert batch["advantages"].shape == batch["completion_ids"].shape
    assert name == "uniform" or expected.stats["weight_deviation"] > 1e-3
    # The gradient of a divergence so small keeps three to four digits of float32's seven.
    tolerance = 2e-2 if name == "oar_g" else 2e-4
    torch.testing.assert_close(of_responses(batch), wanted, rtol=tolerance, atol=tolerance)
    assert not batch["advantages"][~batch["completion_mask"].bool()].any()
    assert bool(batch["advantages"][scripted.TRUNCATED].any()) == (not signal.mask_truncated)


def test_answers_in_another_format(tmp_path: Path) -> None:
    answer = r" (?P<content>six|say|or)"
    trainer = build(tmp_path, weights={"token_weights": GrailConfig(gate="all"), "answer": answer})
    plain, expected = plain_weights(GrailConfig(gate="all"), answer=answer)
    assert sum(span is not None for span in expected.spans) == 5
    wanted = torch.cat(response_values(expected.weights * plain.advantages.unsqueeze(1), plain.response_mask))
    torch.testing.assert_close(of_responses(generation_batch(trainer)), wanted, rtol=2e-4, atol=2e-4)
    refused(tmp_path, "answer='box' is no format", weights={"answer": "box"})
    refused(tmp_path, "missing_answers='no' is unknown; choose one of stop,", weights={"missing_answers": "no"})


@pytest.mark.parametrize("signal", [GrailConfig(), METHODS["surprisal"].replace(statistics="reasoning")])
def test_a_run_without_answers_stops(
    tmp_path: Path, signal: Signal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grail_advantage.missing_answers.ENOUGH", 8)
    weights = {"token_weights": signal, "answer": "hashes"}
    build(tmp_path, weights={**weights, "missing_answers": "warn"}, max_steps=1).train()
    assert "0 of 8 responses have an answer in the format hashes" in caplog.text
    with pytest.raises(ValueError, match=r"answer=boxed \(.*\) would find one in 5 of 8\. missing_answers=warn trains"):
        build(tmp_path, weights=weights, max_steps=1).train()


def hand_written_loss(
    kind: str, ratio_T: torch.Tensor, log_probs_T: torch.Tensor, advantages_T: torch.Tensor, args: Any
) -> torch.Tensor:
    """Sum over a row's tokens."""
    if kind == "cispo":
        return -(ratio_T.clamp(max=args.epsilon_high).detach() * advantages_T * log_probs_T).sum()
    if kind == "sapo":
        slope_T = torch.where(advantages_T > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        return -(4 / slope_T / (1 + torch.exp(-slope_T * (ratio_T - 1))) * advantages_T).sum()
    clipped_T = ratio_T.clamp(1 - args.epsilon, 1 + args.epsilon_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).sum()


@pytest.mark.parametrize("loss_type", checks.LOSSES)
def test_gradient_of_the_loss_is_a_hand_written_one(tmp_path: Path, loss_type: str) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"}, loss_type=loss_type, epsilon_high=0.28)
    batch = generation_batch(trainer)
    rows, expected = plain_weights(GrailConfig())
    weights = expected.weights

    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    tokens = int(rows.response_mask.sum())
    total = torch.zeros(())
    old = torch.zeros(batch["completion_ids"].shape)
    for row in range(8):
        ids_S = rows.input_ids[row, rows.attention_mask[row].bool()]
        where_T = rows.response_mask[row].nonzero().flatten()
        logits_SV = model(input_ids=ids_S[None]).logits[0] / scripted.TEMPERATURE
        log_probs_T = logits_SV[where_T - 1].log_softmax(-1).gather(1, ids_S[where_T, None])[:, 0]
        old_T = log_probs_T.detach() + torch.randn(len(where_T), generator=generator) * 0.3
        old[row, : len(where_T)] = old_T
        of_row = hand_written_loss(
            loss_type,
            (log_probs_T - old_T).exp(),
            log_probs_T,
            weights[row, where_T] * rows.advantages[row],
            trainer.args,
        )
        if loss_type in ("grpo", "sapo"):
            total = total + of_row / len(where_T) / 8
        elif loss_type == "dr_grpo":
            total = total + of_row / (8 * trainer.args.max_completion_length)
        else:
            total = total + of_row / tokens
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])

    loss, gradient = parameters_gradient(trainer, batch | {"old_per_token_logps": old})
    torch.testing.assert_close(loss, total.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    ones = batch | {"old_per_token_logps": old, "advantages": rows.advantages}
    assert not torch.allclose(parameters_gradient(trainer, ones)[1], expected, rtol=0.05)


def test_weights_are_computed_once_a_generation_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seen = [], []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(named["step"])
        return compute_token_weights(*arguments, **named)

    class Recording(scripted.ScriptedTokenWeights):
        def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append({name: inputs[name].clone() for name in ("completion_ids", "completion_mask", "advantages")})
            return super()._compute_loss(model, inputs)

    monkeypatch.setattr(trainer_module, "compute_token_weights", counted)
    trainer = build(
        tmp_path,
        Recording,
        weights={"token_weights": "grail"},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
        learning_rate=1e-3,
    )
    trainer.train()
    # 4 micro-batches of 2 rows make a generation batch, which is used twice; 2 micro-batches make an optimiser step.
    assert calls == [0, 4] and len(seen) == 16

    plain, weighted = plain_weights(GrailConfig())
    weights = weighted.weights
    expected = {
        tuple(ids.tolist()): values
        for ids, values in zip(
            response_values(plain.input_ids, plain.response_mask),
            response_values(weights * plain.advantages.unsqueeze(1), plain.response_mask),
            strict=True,
        )
    }
    counts: Counter = Counter()
    for batch in seen[:8]:  # both iterations over the first generation batch, shuffled and split
        ids = response_values(batch["completion_ids"], batch["completion_mask"])
        for row, found_T in zip(ids, response_values(batch["advantages"], batch["completion_mask"]), strict=True):
            torch.testing.assert_close(found_T, expected[tuple(row.tolist())], rtol=1e-4, atol=1e-4)
            counts[tuple(row.tolist())] += 1
    assert set(counts.values()) == {2} and len(counts) == 8


@pytest.mark.parametrize(("by_trl", "by_signal"), [(False, False), (False, True), (True, False)])
def test_truncated_rows(tmp_path: Path, by_trl: bool, by_signal: bool) -> None:
    trainer = build(
        tmp_path,
        weights={"token_weights": GrailConfig(mask_truncated=by_signal)},
        mask_truncated_completions=by_trl,
    )
    batch = generation_batch(trainer)
    row = scripted.TRUNCATED
    assert bool(batch["completion_mask"][row].any()) == (not by_trl)
    assert bool(batch["advantages"][row].any()) == (not by_trl and not by_signal)
    assert trainer._metrics["train"]["grail/truncated_rate"] == [1 / 8]
    others = [index for index in range(8) if index != row]
    assert batch["advantages"][others].any(dim=1).all()


def test_figures_stand_in_the_logs_and_the_table_keeps_its_advantages(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"}, max_steps=1, log_completions=True)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "grail/selected_rate" in entry)
    expected = plain_weights(GrailConfig())[1].stats
    for name, value in expected.items():
        assert logged[f"grail/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert logged["grail/truncated_rate"] == 1 / 8 and logged["grail/seconds"] > 0
    assert not any(name in logged for name in ("eval_grail/selected_rate", "surprisal/selected_rate"))
    advantages = [row.advantage for row in scripted.rollouts(mask_truncated=False)]
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages)


def test_evaluation_is_not_weighted(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"})
    trainer.model.eval()
    assert generation_batch(trainer)["advantages"].shape == (8,)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"}, gradient_checkpointing=True)
    hooks = {name: len(module._forward_hooks) for name, module in trainer.model.named_modules()}
    batch = generation_batch(trainer)
    assert batch["advantages"].requires_grad is False
    assert all(module.training for module in trainer.model.modules())
    assert all(p.grad is None for p in trainer.model.parameters())
    assert {name: len(module._forward_hooks) for name, module in trainer.model.named_modules()} == hooks


@pytest.mark.parametrize("name", ["grail", "surprisal"])
def test_dropout_is_off(tmp_path: Path, name: str) -> None:
    results = [
        generation_batch(build(tmp_path, model=tiny_model(attention_dropout=rate), weights={"token_weights": name}))
        for rate in (0.0, 0.5)
    ]
    torch.testing.assert_close(results[1]["advantages"], results[0]["advantages"], rtol=1e-4, atol=1e-4)


def test_half_precision_and_checkpointing(tmp_path: Path) -> None:
    figures = []
    for bf16 in (False, True):
        trainer = build(
            tmp_path,
            weights={"token_weights": "grail"},
            bf16=bf16,
            gradient_checkpointing=bf16,
            max_steps=1,
            temperature=1.0,
        )
        trainer.train()
        figures.append(trainer.state.log_history[0])
    assert figures[0]["grail/weight_deviation"] != figures[1]["grail/weight_deviation"]  # bf16 it was
    assert figures[1]["grail/weight_deviation"] == pytest.approx(figures[0]["grail/weight_deviation"], rel=0.05)
    assert figures[1]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=0.2)


def test_old_log_probs_of_trl_are_used_where_there_are_any(tmp_path: Path) -> None:
    """With ``num_iterations`` above 1 TRL has them; they are those that this trainer computes otherwise."""
    signal = method("surprisal").build({"gate": "all", "mask_truncated": False})
    without = build(tmp_path, weights={"token_weights": signal})
    with_them = build(tmp_path, weights={"token_weights": signal}, num_iterations=2)
    calls = []
    own = with_them._get_per_token_logps_and_entropies
    with_them._get_per_token_logps_and_entropies = lambda *a, **k: (
        calls.append(k.get("compute_entropy", False)) or own(*a, **k)
    )
    first, second = generation_batch(without), generation_batch(with_them)
    assert "old_per_token_logps" not in first and "old_per_token_logps" in second
    assert calls == [False]  # TRL's own
    torch.testing.assert_close(first["advantages"], second["advantages"])


def test_mean_over_the_batch_is_the_loss_types(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "stare"})
    values_BT = torch.tensor([[1.0, 2.0, 3.0], [5.0, float("nan"), float("nan")]])
    mask_BT = torch.tensor([[True, True, True], [True, False, False]])
    for loss_type in checks.LOSSES:
        trainer.loss_type = trainer.args.loss_type = loss_type
        expected = {"grpo": 3.5, "sapo": 3.5, "dr_grpo": 11 / (2 * 64)}.get(loss_type, 11 / 4)
        assert trainer._aggregate(values_BT, mask_BT) == pytest.approx(expected)


def test_mean_over_the_batch_reaches_the_method(tmp_path: Path) -> None:
    """STARE is on where that mean is below its threshold; with dr_grpo it is the smaller one."""
    entropies = plain_weights(method("entropy").build({"gate": "all"}), mask_truncated=False)[1].scores
    threshold = 0.7 * float(entropies.nanmean())
    results = {}
    for loss_type in ("bnpo", "dr_grpo"):
        weights = {"token_weights": "stare", "token_weight_options": {"threshold": threshold}}
        trainer = build(tmp_path, weights=weights, loss_type=loss_type)
        generation_batch(trainer)
        results[loss_type] = trainer._metrics["train"]["stare/neutral_rate"]
    assert results["bnpo"] == [1.0] and results["dr_grpo"][0] < 1.0


def test_training_step_reaches_the_method(tmp_path: Path) -> None:
    seen = []

    @register_signal("sees_the_step_in_trl")
    class SeesTheStep(type(NO_CHANGE)):
        def select(self, batch: Any) -> Any:
            seen.append(batch.step)
            return super().select(batch)

    trainer = build(tmp_path, weights={"token_weights": "sees_the_step_in_trl"}, max_steps=3)
    trainer.train()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_is_part_of_the_policy(tmp_path: Path, checkpointing: bool) -> None:
    model = tiny_model()
    trainer = scripted.ScriptedTokenWeights(
        model,
        scripted.reward,
        scripted.config(tmp_path, gradient_checkpointing=checkpointing, max_steps=2, learning_rate=0.5),
        train_dataset=scripted.prompts(),
        processing_class=char_tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
        token_weights=GrailConfig("robust", gate="all"),
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # zeros when new
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    trainer.model.train()
    batch = generation_batch(trainer)
    assert all(p.grad is None for p in trainer.model.parameters())

    plain = make_batch(scripted.rollouts(), "right")
    signal = GrailConfig("robust", gate="all")
    # The adapter merged into a plain copy of the model, by hand.
    merged = tiny_model()
    for name, module in merged.named_modules():
        adapted = dict(trainer.model.base_model.model.named_modules())[name]
        if hasattr(adapted, "lora_A"):
            change = adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight * adapted.scaling["default"]
            module.weight.data += change.detach()
    settings = {"temperature": scripted.TEMPERATURE}
    by_hand = compute_token_weights(merged, char_tokenizer(), *plain.tensors(), signal, **settings)
    without = compute_token_weights(tiny_model(), char_tokenizer(), *plain.tensors(), signal, **settings)
    advantages = of_responses(batch)
    wanted = torch.cat(response_values(by_hand.weights * plain.advantages.unsqueeze(1), plain.response_mask))
    torch.testing.assert_close(advantages, wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(by_hand.weights, without.weights, atol=0.05)

    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    assert any(not torch.equal(now[name], value) for name, value in trained.items())


def rlsd_data(**columns: Any) -> Dataset:
    chats = [[{"role": "user", "content": prompt}] for prompt in scripted.GROUPS]
    return Dataset.from_dict({"prompt": chats, "solution": ["five, as 2 + 3 = 5", "nine"], **columns})


def test_rlsd_reads_the_other_columns(tmp_path: Path) -> None:
    signal = method("rlsd").build({"privileged_column": "solution"})
    trainer = build(tmp_path, data=rlsd_data(), tokenizer=chat_tokenizer(), weights={"token_weights": signal})
    batch = generation_batch(trainer)
    answers = ["five, as 2 + 3 = 5", "nine"]
    chats = [[{"role": "user", "content": prompt}] for prompt in scripted.GROUPS]
    # The prompt that the chat template makes.
    rows = [replace(row, prompt=f"user: {row.prompt} assistant: ") for row in scripted.rollouts()]
    plain = make_batch(rows, "right")
    expected = compute_token_weights(
        tiny_model(),
        chat_tokenizer(),
        *plain.tensors(),
        signal,
        temperature=scripted.TEMPERATURE,
        examples=[Example(chats[i // 4], {"solution": answers[i // 4]}, {}) for i in range(8)],
    )
    assert expected.stats["weight_deviation"] > 0.01
    advantages = of_responses(batch)
    wanted = torch.cat(response_values(expected.weights * plain.advantages.unsqueeze(1), plain.response_mask))
    torch.testing.assert_close(advantages, wanted, rtol=1e-3, atol=1e-3)


def refused(tmp_path: Path, match: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=match):
        build(tmp_path, **changes)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'.*'grail'.*use 'token'"),
        ({"loss_type": "luspo"}, "loss_type='luspo'.*use one of grpo, bnpo"),
        ({"loss_type": "vespo"}, "loss_type='vespo'.*use one of grpo, bnpo"),
        ({"temperature": 0.0}, "temperature=0.0.*above 0"),
        ({"fp16": True}, "fp16=True.*use bf16"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    changed = scripted.config(tmp_path)
    for name, value in options.items():
        setattr(changed, name, value)
    with pytest.raises(ValueError, match=match):
        checks.check_arguments({"args": changed}, GrailConfig())
    if "fp16" not in options:  # accelerate refuses that on a CPU first
        refused(tmp_path, match, **options)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("fsdp", "full_shard", "fsdp='full_shard'.*not tested"),
        ("deepspeed_plugin", SimpleNamespace(zero_stage=3), "deepspeed='ZeRO-3'.*use ZeRO-1 or ZeRO-2"),
        ("parallelism_config", SimpleNamespace(tp_size=2), r"parallelism_config.tp_size=2.*use 1"),
        ("parallelism_config", SimpleNamespace(cp_size=2), r"parallelism_config.cp_size=2.*use 1"),
    ],
)
def test_layouts_that_are_refused(tmp_path: Path, name: str, value: Any, match: str) -> None:
    """On the settings alone: this machine cannot start such layouts."""
    changed = scripted.config(tmp_path)
    setattr(changed, name, value)
    with pytest.raises(ValueError, match=match):
        checks.check_arguments({"args": changed}, GrailConfig())


def test_layouts_that_are_accepted(tmp_path: Path) -> None:
    for stage in (1, 2):
        changed = scripted.config(tmp_path)
        changed.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
        changed.parallelism_config = ParallelismConfig()
        checks.check_arguments({"args": changed}, GrailConfig())


def test_fsdp_of_the_launcher_is_refused(tmp_path: Path) -> None:
    """``accelerate launch --use_fsdp`` leaves ``args.fsdp`` empty."""
    trainer = build(tmp_path, weights={"token_weights": "grail"})
    checks.check_trainer(trainer, GrailConfig())
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"fsdp=.*not tested"):
        checks.check_trainer(trainer, GrailConfig())


def tool(text: str) -> str:
    """Say it.

    Args:
        text: What to say.
    """
    return text


class Processor(ProcessorMixin):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"tools": [tool]}, "tools=.*leave it out"),
        ({"rollout_func": lambda *_: {}}, "rollout_func=.*leave it out"),
        ({"environment_factory": object}, "environment_factory=.*leave it out"),
        ({"processing_class": Processor()}, "text alone; give a tokenizer"),
        ({"train_dataset": Dataset.from_dict({"prompt": ["a"], "image": ["b"]})}, "text alone"),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, argument: dict[str, Any], match: str) -> None:
    given = {"train_dataset": scripted.prompts(), "processing_class": char_tokenizer()} | argument
    with pytest.raises(ValueError, match=match):
        TokenWeightGRPOTrainer(tiny_model(), scripted.reward, scripted.config(tmp_path), **given)


def test_argument_by_position_is_refused_too(tmp_path: Path) -> None:
    """``tools`` is the eleventh argument of ``GRPOTrainer``."""
    arguments = [tiny_model(), scripted.reward, scripted.config(tmp_path), scripted.prompts(), None, char_tokenizer()]
    with pytest.raises(ValueError, match="tools="):
        TokenWeightGRPOTrainer(*arguments, None, None, (None, None), None, None, [tool])


def test_multi_modal_model_that_only_trl_recognises_is_refused(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"})
    trainer.processing_class = object.__new__(ProcessorMixin)
    with pytest.raises(ValueError, match="text alone"):
        checks.check_trainer(trainer, GrailConfig())


def test_method_that_reads_what_trl_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL has all that a method can ask for now; this is for what may be added."""
    monkeypatch.setattr(checks, "PROVIDED", checks.PROVIDED - {"entropy"})
    refused(
        tmp_path, "'high_entropy' reads entropy, which TRL does not compute", weights={"token_weights": "high_entropy"}
    )


RLSD = {"token_weights": "rlsd", "token_weight_options": {"privileged_column": "solution"}}
METHODS_REFUSED: dict[str, dict[str, Any]] = {
    "'graill' is no registered signal; choose one of": {"weights": {"token_weights": "graill"}},
    "grail.lief is not an option": {"weights": {"token_weights": "grail", "token_weight_options": {"lief": 1}}},
    "token_weight_options are for a method given by its name": {
        "weights": {"token_weights": GrailConfig(), "token_weight_options": {"leaf": "first"}}
    },
    "'rlsd' reads the column solution, which train_dataset lacks; its columns are prompt": {"weights": RLSD},
    "prompt must be a list of messages": {"data": scripted.prompts(solution=["5", "9"]), "weights": RLSD},
    "remove_unused_columns=True.*takes away solution; use False": {
        "data": rlsd_data(),
        "remove_unused_columns": True,
        "weights": RLSD,
    },
}


@pytest.mark.parametrize(("match", "given"), METHODS_REFUSED.items(), ids=METHODS_REFUSED)
def test_methods_that_are_refused(tmp_path: Path, match: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        build(tmp_path, tokenizer=chat_tokenizer(), **given)


def test_prompts_of_a_stream_are_judged_with_the_first_batch(tmp_path: Path) -> None:
    signal = method("rlsd").build({"privileged_column": "solution"})
    stream = scripted.prompts(solution=["5", "9"]).to_iterable_dataset()
    trainer = build(tmp_path, data=stream, tokenizer=chat_tokenizer(), weights={"token_weights": signal}, max_steps=1)
    with pytest.raises(ValueError, match="prompt must be a list of messages"):
        generation_batch(trainer)


def test_groups_that_are_split_over_processes_are_refused(tmp_path: Path) -> None:
    signal = METHODS["shear"]
    trainer = build(tmp_path, weights={"token_weights": signal})
    args = SimpleNamespace(**vars(trainer.args))
    args.per_device_train_batch_size, args.steps_per_generation = 2, 3
    copy = SimpleNamespace(
        args=args,
        is_fsdp_enabled=False,
        processing_class=char_tokenizer(),
        accelerator=SimpleNamespace(num_processes=2),
        num_generations=4,
    )
    with pytest.raises(ValueError, match=r"must be on one process.*=6 a multiple of num_generations=4"):
        checks.check_trainer(copy, signal)
    checks.check_trainer(copy, GrailConfig())
    args.steps_per_generation = 2
    checks.check_trainer(copy, signal)


def test_other_versions_are_refused() -> None:
    for version in ("1.14.2", "1.17.0", "0.29.0"):
        with pytest.raises(ValueError, match=rf"trl {version} is installed.*pip install 'trl>=1.15,<1.17'"):
            checks.check_trl_version(version)
    for version in ("1.15.0", "1.15.3", "1.16.0", "1.16.1"):
        checks.check_trl_version(version)


def test_published_settings_of_the_page_are_accepted(tmp_path: Path) -> None:
    (text,) = documentation.snippets("trl.md")
    names: dict[str, Any] = {"GRPOConfig": lambda _, **settings: scripted.config(tmp_path, **settings)}
    exec(text, names)
    checks.check_arguments({"args": names["config"]}, GrailConfig())
    assert names["config"].generation_batch_size == 256 and names["config"].num_iterations == 4


def test_every_method_is_known_by_its_name(tmp_path: Path) -> None:
    """Every registered one that needs nothing but prompts and rewards starts with its defaults."""
    started = 0
    for name, known in methods().items():
        ours = known.signal_class.__module__.startswith("grail_advantage.")
        if not ours or name == "rlsd" or known.build({}).reads - checks.PROVIDED:
            continue
        trainer = build(tmp_path, weights={"token_weights": name})
        assert trainer.signal.name == name
        started += 1
    assert started >= 10
