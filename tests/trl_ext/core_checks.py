"""Token weights in TRL; run by test_trl.py with the oldest and the newest TRL on the path."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.integrations.neftune import activate_neftune
from trl import GRPOTrainer

from grail_advantage import Grail, Method, Oar, Rollouts, TokenWeights, Weights, compute_token_weights, register
from grail_advantage.data import LARGEST, Example
from grail_advantage.dump import read_dump
from grail_advantage.method import build as method_of
from grail_advantage.trl_ext import rules
from grail_advantage.trl_ext import trainer as trainer_module
from grail_advantage.trl_ext.rules import LOSSES
from grail_advantage.weigh import weigh
from tests import documentation
from tests.core.common import watch_inputs
from tests.core.tiny_models import END, Batch, char_tokenizer, make_batch, tiny_model
from tests.trl_ext import scripted
from tests.trl_ext.scripted import build, generation_batch, response_values

CHATML = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat_tokenizer() -> Any:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def plain_weights(signal: Method, *, mask_truncated: bool = True, **known: Any) -> tuple[Batch, TokenWeights]:
    """The script's responses by :func:`compute_token_weights`, on other padding than TRL's."""
    batch = make_batch(scripted.rollouts(mask_truncated=mask_truncated), "right")
    settings = {"temperature": scripted.TEMPERATURE, **known}
    return batch, compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), signal, **settings)


def of_responses(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All token advantages of a batch of TRL's, one response after the other."""
    return torch.cat(response_values(batch["advantages"], batch["completion_mask"]))


def parameters_gradient(trainer: GRPOTrainer, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    trainer.model.zero_grad()
    return loss.detach(), gradient


@register("blamed")
class Blamed(Method):
    """Weights from a column of the data set."""

    reads = frozenset({"field:blame"})

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return torch.tensor(r.fields["blame"]).unsqueeze(1).expand(r.mask.shape)

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return Weights(scores)


METHODS: dict[str, Method] = {
    "grail, robust": Grail("robust", gate="all"),
    "grail, hidden states": Grail(leaf="middle", mask_truncated=False),
    "oar_p": Oar("perturbation"),
    "surprisal": method_of("surprisal", {"gate": "all", "reshaper": "power"}),
    "stare": method_of("stare", {"variant": "C2", "threshold": 100.0}),
    "shear": method_of("shear", {"window": 6, "stride": 3}),
    "a field": Blamed(),
}
BLAME = [0.5, 2.0]
"""Of each prompt."""


@pytest.mark.parametrize("name", METHODS)
def test_token_advantages_are_those_of_compute_token_weights(tmp_path: Path, name: str) -> None:
    signal = METHODS[name]
    data = scripted.prompts(blame=BLAME)
    trainer = build(tmp_path, data=data, weights={"token_weights": signal}, remove_unused_columns=False)
    batch = generation_batch(trainer)

    groups = torch.arange(8) // scripted.GENERATIONS
    known = {"groups": groups, "fields": {"blame": [BLAME[group] for group in groups]}}
    known["masked"] = (torch.arange(8) == scripted.TRUNCATED) & signal.mask_truncated
    plain, expected = plain_weights(signal, mask_truncated=signal.mask_truncated, **known)
    wanted = torch.cat(response_values(expected.advantages, plain.response_mask))
    assert batch["advantages"].shape == batch["completion_ids"].shape
    assert len(wanted.abs().unique()) > 3 or name == "a field"
    torch.testing.assert_close(of_responses(batch), wanted, rtol=2e-4, atol=2e-4)
    assert not batch["advantages"][~batch["completion_mask"].bool()].any()
    assert bool(batch["advantages"][scripted.TRUNCATED].any()) == (not signal.mask_truncated)


INF, NAN = float("inf"), float("nan")
UNUSABLE: dict[str, tuple[list[float | None], dict[str, Any]]] = {
    # Of the responses of the second prompt: a second function's rewards; the first one's are the script's.
    "infinite": ([0.0, INF, 0.0, 0.0], {}),
    "NaN": ([0.0, NAN, 0.0, 0.0], {"token_weights": "step_values"}),
    "its weighted sum is too large": ([0.0, 1e17, 0.0, 0.0], {"reward_weights": [1.0, 100.0]}),
    "a group of both signs": ([INF, -INF, INF, -INF], {"scale_rewards": "group", "token_weights": "uniform"}),
    "normalised apart": ([0.0, -INF, 0.0, 0.0], {"multi_objective_aggregation": "normalize_then_sum"}),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_reward_that_cannot_be_used_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The update is that without these responses: no reward function scores them, TRL's ``None``, which it takes NaN
    as."""
    values, options = UNUSABLE[case]
    name = options.get("token_weights", "grail")
    places = {text.removesuffix(END): place for place, (text, _) in enumerate(scripted.GROUPS["Nine?"])}
    unusable = [value is not None and abs(value) >= 1e17 for value in values]

    def trained(others: list[float | None], known: list[bool], folder: Path) -> tuple[GRPOTrainer, torch.Tensor]:
        def of_script(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
            return [
                scripted.REWARDS[prompt, text] if prompt != "Nine?" or known[places[text]] else None
                for prompt, text in zip(prompts, completions, strict=True)
            ]

        def of_case(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
            pairs = zip(prompts, completions, strict=True)
            return [others[places[text]] if prompt == "Nine?" else 0.0 for prompt, text in pairs]

        monkeypatch.setattr(scripted, "reward", [of_script, of_case])
        settings = {"token_weights": name, "token_dump": folder}
        given = {key: value for key, value in options.items() if key != "token_weights"}
        trainer = build(tmp_path, weights=settings, max_steps=1, **given)
        trainer.train()
        return trainer, torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])

    trainer, parameters = trained(values, [True] * 4, tmp_path / "tokens")
    without = [None if bad or value != value else value for value, bad in zip(values, unusable, strict=True)]
    _, expected = trained(without, [not bad for bad in unusable], tmp_path / "others")
    assert parameters.isfinite().all() and torch.equal(parameters, expected)
    start = torch.cat([parameter.detach().flatten() for parameter in tiny_model().parameters()])
    assert not torch.equal(parameters, start), "the other responses train"
    (figures,) = [entry for entry in trainer.state.log_history if f"{name}/unjudged_rate" in entry]
    assert figures[f"{name}/unjudged_rate"] == pytest.approx(sum(unusable) / 8)
    rows = [row for row in read_dump(tmp_path / "tokens")][scripted.GENERATIONS :]
    for row, bad in zip(rows, unusable, strict=True):
        assert not bad or ((row.outcome is None or abs(row.reward) > LARGEST) and not np.any(row.advantage_T))


class Stock(scripted.Scripted, GRPOTrainer):
    """TRL's own trainer."""


APART = {"multi_objective_aggregation": "normalize_then_sum"}
ONE, THREE = [[None, 0.9, 0.9, 0.9]], [[0.1, 0.2, 0.4, 0.4], [0.2, 0.4, 0.1, 0.2], [0.4, 0.1, 0.2, 0.1]]


@pytest.mark.parametrize(
    ("columns", "options"), [(ONE, {"scale_rewards": "group"}), (THREE, {}), (ONE, APART), (THREE, APART)]
)
def test_equal_rewards_have_no_advantage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[list[float | None]], options: dict[str, Any]
) -> None:
    """Of the first prompt; TRL's own advantages are off by rounding. The second prompt's keep TRL's."""
    places = {
        text.removesuffix(END): place
        for place, (text, _) in enumerate(scripted.GROUPS["Two plus three, what is that?"])
    }

    def function(values: list[float | None]) -> Any:
        def score(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
            pairs = zip(prompts, completions, strict=True)
            return [
                scripted.REWARDS["Nine?", text] if prompt == "Nine?" else values[places[text]] for prompt, text in pairs
            ]

        return score

    monkeypatch.setattr(scripted, "reward", [function(values) for values in columns])
    stock = generation_batch(build(tmp_path, Stock, **options))["advantages"]
    batch = generation_batch(build(tmp_path, weights={"token_weights": "uniform"}, **options))
    if columns == THREE and options == APART:  # the functions themselves differ
        assert batch["advantages"][1:4].any()
        return
    assert stock[1:4].any(), "rounding leaves something here"
    assert not batch["advantages"][:4].any()
    assert torch.equal(batch["advantages"][5:, 0], stock[5:]), "the first one is truncated"


def test_answers_in_another_format(tmp_path: Path) -> None:
    answer = r" (?P<content>six|say|or)"
    trainer = build(tmp_path, weights={"token_weights": Grail(gate="all"), "answer": answer})
    plain, expected = plain_weights(Grail(gate="all"), answer=answer)
    assert sum(span is not None for span in expected.spans) == 5
    wanted = torch.cat(response_values(expected.weights * plain.advantages.unsqueeze(1), plain.response_mask))
    torch.testing.assert_close(of_responses(generation_batch(trainer)), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("signal", [Grail(), METHODS["surprisal"].replace(statistics="reasoning")])
def test_a_run_without_answers_stops(
    tmp_path: Path, signal: Method, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grail_advantage.answers.missing.ENOUGH", 8)
    weights = {"token_weights": signal, "answer": "hashes"}
    build(tmp_path, weights={**weights, "missing_answers": "warn"}, max_steps=1).train()
    assert "0 of 8 responses have an answer in the format hashes" in caplog.text
    with pytest.raises(ValueError, match=r"answer=boxed \(.*\) would find one in 5 of 8\. missing_answers=warn trains"):
        build(tmp_path, weights=weights, max_steps=1).train()


def hand_written_loss(
    kind: str, ratio_T: torch.Tensor, log_probs_T: torch.Tensor, advantages_T: torch.Tensor, args: Any
) -> torch.Tensor:
    """Sum over a response's tokens."""
    if kind == "cispo":
        return -(ratio_T.clamp(max=args.epsilon_high).detach() * advantages_T * log_probs_T).sum()
    if kind == "sapo":
        slope_T = torch.where(advantages_T > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        return -(4 / slope_T / (1 + torch.exp(-slope_T * (ratio_T - 1))) * advantages_T).sum()
    clipped_T = ratio_T.clamp(1 - args.epsilon, 1 + args.epsilon_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).sum()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_of_the_loss_is_a_hand_written_one(tmp_path: Path, loss_type: str) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"}, loss_type=loss_type, epsilon_high=0.28)
    batch = generation_batch(trainer)
    rows, expected = plain_weights(Grail())
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
    ones = batch | {"old_per_token_logps": old, "advantages": rows.advantages[:, None]}
    assert not torch.allclose(parameters_gradient(trainer, ones)[1], expected, rtol=0.05)


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


@pytest.mark.parametrize(
    ("loss_type", "scale"), [*((loss, "none") for loss in LOSSES if loss != "cispo"), ("cispo", "group")]
)
def test_the_update_is_the_same_without_zero_advantage_responses(tmp_path: Path, loss_type: str, scale: str) -> None:
    """Of two optimiser steps on micro-batches that hold some, none and only such responses; and fewer go through the
    model."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    options = {**sizes, "loss_type": loss_type, "scale_rewards": scale, "learning_rate": 1.0, "epsilon_high": 0.28}
    before = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    trained, seen, zeros = [], [], []

    class Recording(scripted.ScriptedTokenWeights):
        def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
            rewards = super()._calculate_rewards(*arguments, **named)
            rewards[scripted.GENERATIONS :] = 0.0  # the second prompt's
            return rewards

        def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            zeros.append(int((inputs["advantages"] == 0).all(dim=1).sum()))
            return super()._compute_loss(model, inputs)

    for skip in (False, True):
        weights = {"token_weights": "uniform", "skip_zero_advantage": skip}
        trainer = build(tmp_path, Recording, weights=weights, num_iterations=2, max_steps=4, **options)
        trainer.args.max_grad_norm = 0.0
        with watch_inputs(trainer.model.model.layers[0]) as shapes:
            trainer.train()
        seen.append(sum(rows for rows, *_ in shapes[5 * skip :]))  # but for the probe
        trained.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) - before)
    scale_of_update = float(trained[0].abs().max())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-5 * scale_of_update)
    assert scale_of_update > 1e-3 and {0, 1, 2} <= set(zeros)
    assert 0 < seen[1] < seen[0]


def _noisy_embeddings(model: Any) -> Any:
    activate_neftune(model, 5)
    return model


DRAWING = {
    "dropout": lambda: tiny_model(attention_dropout=0.1),
    "a hook of NEFTune's": lambda: _noisy_embeddings(tiny_model()),
    "LoRA with dropout": lambda: get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_leaving_out_ends_before_the_first_update_with_a_model_that_draws_at_random(tmp_path: Path, name: str) -> None:
    """Arguments that are refused are in ``rules_checks.py``."""
    trainer = build(tmp_path, model=DRAWING[name](), weights={"token_weights": "uniform", "skip_zero_advantage": True})
    before = [values.detach().clone() for values in trainer.model.parameters()]
    with pytest.raises(ValueError, match=r"responses depend on those beside them: .*draws at random, differ by"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_leaving_out_begins_with_the_numbers_of_a_run_that_does_not(tmp_path: Path) -> None:
    """The probe draws nothing that the run misses, and is made once."""
    seen, states = [], []

    class Watching(scripted.ScriptedTokenWeights):
        def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            states.append(torch.get_rng_state())
            return loss

    for skip in (False, True):
        weights = {"token_weights": "uniform", "skip_zero_advantage": skip}
        trainer = build(tmp_path / str(skip), Watching, weights=weights, max_steps=2, per_device_train_batch_size=4)
        with watch_inputs(trainer.model.model.layers[0]) as shapes:
            trainer.train()
        seen.append(len(shapes))
    assert seen[1] == seen[0] + 6
    half = len(states) // 2
    assert half and all(map(torch.equal, states[:half], states[half:]))


SIZES = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 95, "eos_token_id": 96},
}
STATEFUL = {
    "Mamba2Config": {"num_heads": 8, "n_groups": 1, "state_size": 8},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Config": {},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_leaving_out_is_refused_where_padding_enters_a_state(tmp_path: Path, name: str) -> None:
    """The gradient of a response that is padded on the left, alone and beside another, by the installed
    transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | STATEFUL[name]))
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)  # the padding's too, as a trained model's
    ids, mask = torch.stack([torch.arange(5, 21), torch.arange(40, 56)]), torch.ones(2, 16, dtype=torch.int64)
    mask[1, :6] = 0
    gradients = []
    for rows in (slice(0, 2), slice(1, 2)):
        model.zero_grad()
        logits_SV = model(input_ids=ids[rows], attention_mask=mask[rows], use_cache=False).logits[-1, 6:-1]
        logits_SV.log_softmax(-1).gather(1, ids[1, 7:, None]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    difference = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    assert difference > 1e-2 or difference < 1e-5
    exact = difference < 1e-5
    skipping = {"token_weights": "uniform", "skip_zero_advantage": True}
    trainer = build(tmp_path, model=model, weights=skipping, router_aux_loss_coef=0.0)
    with (
        nullcontext() if exact else pytest.raises(ValueError, match=r"log-probabilities .* of their spread .*; or set")
    ):
        trainer.train()
    assert exact or name != "Qwen3Config"


def test_weights_are_computed_once_a_generation_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And go with their responses, which TRL shuffles and splits."""
    calls, seen = [], []

    def counted(host: Any, *rest: Any) -> Any:
        calls.append(host.rollouts().step)
        return weigh(host, *rest)

    class Recording(scripted.ScriptedTokenWeights):
        def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.append({name: inputs[name].clone() for name in ("completion_ids", "completion_mask", "advantages")})
            return super()._compute_loss(model, inputs)

    monkeypatch.setattr(trainer_module, "weigh", counted)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trainer = build(tmp_path, Recording, weights={"token_weights": "grail"}, num_iterations=2, max_steps=8, **sizes)
    trainer.train()
    # 4 micro-batches of 2 responses make a generation batch, which is used twice; 2 micro-batches make an optimiser
    # step.
    assert calls == [0, 4] and len(seen) == 16

    plain, weighted = plain_weights(Grail())
    ids, values = (
        response_values(of, plain.response_mask)
        for of in (plain.input_ids, weighted.weights * plain.advantages.unsqueeze(1))
    )
    expected = {tuple(of_row.tolist()): values_T for of_row, values_T in zip(ids, values, strict=True)}
    counts: Counter = Counter()
    for batch in seen[:8]:  # both iterations over the first generation batch
        ids, values = (
            response_values(batch[name], batch["completion_mask"]) for name in ("completion_ids", "advantages")
        )
        for row, found_T in zip(ids, values, strict=True):
            torch.testing.assert_close(found_T, expected[tuple(row.tolist())], rtol=1e-4, atol=1e-4)
            counts[tuple(row.tolist())] += 1
    assert set(counts.values()) == {2} and len(counts) == 8


def test_a_pass_takes_no_more_tokens_together_than_the_updates_micro_batch(tmp_path: Path) -> None:
    """And more responses than one."""
    for micro_batch, most in ((2, 2), (8, 8)):
        sizes = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": 8 // micro_batch}
        trainer = build(tmp_path, weights={"token_weights": Grail(gate="all", span="last")}, **sizes)
        generation_batch(trainer)  # the model is asked once how it computes
        with watch_inputs(trainer.model.model.embed_tokens) as shapes:
            batch = generation_batch(trainer)
        width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        assert sum(rows for rows, _ in shapes) == 4 and max(rows for rows, _ in shapes) > 1
        assert max(rows * length for rows, length in shapes) <= most * width


def test_figures_stand_in_the_logs_and_the_table_keeps_its_advantages(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"}, max_steps=1, log_completions=True)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "grail/selected_rate" in entry)
    for name, value in plain_weights(Grail())[1].stats.items():
        assert logged[f"grail/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert logged["grail/truncated_rate"] == 1 / 8 and logged["grail/seconds"] > 0
    advantages = [row.advantage for row in scripted.rollouts(mask_truncated=False)]
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages)


def test_evaluation_is_not_weighted(tmp_path: Path) -> None:
    trainer = build(tmp_path, weights={"token_weights": "grail"})
    trainer.model.eval()
    assert generation_batch(trainer)["advantages"].shape == (8,)


def test_an_adapter_is_part_of_the_policy(tmp_path: Path) -> None:
    signal = Grail("robust", gate="all")
    trainer = scripted.ScriptedTokenWeights(
        tiny_model(),
        scripted.reward,
        scripted.config(tmp_path, gradient_checkpointing=True, max_steps=2, learning_rate=0.5),
        train_dataset=scripted.prompts(),
        processing_class=char_tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
        token_weights=signal,
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # zeros when new
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    trainer.model.train()
    advantages = of_responses(generation_batch(trainer))
    assert all(p.grad is None for p in trainer.model.parameters())

    # The adapter merged into a plain copy of the model, by hand.
    plain, merged = make_batch(scripted.rollouts(), "right"), tiny_model()
    for name, module in merged.named_modules():
        adapted = dict(trainer.model.base_model.model.named_modules())[name]
        if hasattr(adapted, "lora_A"):
            change = adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight * adapted.scaling["default"]
            module.weight.data += change.detach()
    by_hand, without = (
        compute_token_weights(
            model, char_tokenizer(), *plain.tensors(), signal, temperature=scripted.TEMPERATURE
        ).weights
        for model in (merged, tiny_model())
    )
    wanted = torch.cat(response_values(by_hand * plain.advantages.unsqueeze(1), plain.response_mask))
    torch.testing.assert_close(advantages, wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(by_hand, without, atol=0.05)

    before = {name: (p.requires_grad, p.detach().clone()) for name, p in trainer.model.named_parameters()}
    trainer.train()
    same = {name: torch.equal(p, before[name][1]) for name, p in trainer.model.named_parameters()}
    assert all(same[name] for name, (trains, _) in before.items() if not trains) and not all(same.values())


@pytest.mark.parametrize("name", ["grail", "surprisal"])
def test_virtual_tokens_are_refused(tmp_path: Path, name: str) -> None:
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    with pytest.raises(ValueError, match=r"virtual tokens \(PromptTuningConfig\).*; use .* LoRA"):
        build(tmp_path, weights={"token_weights": name, "peft_config": adapter})


def rlsd_data(**columns: Any) -> Dataset:
    chats = [[{"role": "user", "content": prompt}] for prompt in scripted.GROUPS]
    return Dataset.from_dict({"prompt": chats, "solution": ["five, as 2 + 3 = 5", "nine"], **columns})


def test_rlsd_reads_the_other_columns(tmp_path: Path) -> None:
    signal = method_of("rlsd", {"privileged_column": "solution"})
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


def test_what_is_known_once_the_trainer_is_made(tmp_path: Path) -> None:
    """Processes; and FSDP, of which ``accelerate launch --use_fsdp`` says nothing in ``args.fsdp``."""
    signal = METHODS["shear"]
    trainer = build(tmp_path, weights={"token_weights": signal})
    args = SimpleNamespace(**vars(trainer.args))
    args.per_device_train_batch_size, args.steps_per_generation = 2, 3
    copy = SimpleNamespace(
        args=args,
        model=trainer.model,
        is_fsdp_enabled=False,
        processing_class=char_tokenizer(),
        accelerator=SimpleNamespace(num_processes=2),
    )
    with pytest.raises(ValueError, match=r"^per_device_train_batch_size=2 .*=6 a multiple of num_generations=4"):
        rules.check_trainer(copy, signal, False)
    rules.check_trainer(copy, Grail(), False)
    args.steps_per_generation = 2
    rules.check_trainer(copy, signal, False)
    copy.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"^fsdp="):
        rules.check_trainer(copy, signal, False)


def test_published_settings_of_the_page_are_accepted(tmp_path: Path) -> None:
    (text,) = documentation.snippets("trl.md")
    names: dict[str, Any] = {"GRPOConfig": lambda _, **settings: scripted.config(tmp_path, **settings)}
    exec(text, names)
    rules.check_arguments({"args": names["config"]}, Grail(), rules.TESTED)
    config = names["config"]
    assert config.generation_batch_size == 256 and config.num_iterations == 4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, config.get_warmup_steps(config.max_steps), 200)
    assert schedule.get_last_lr() == [1e-6], "the full rate from the first step"
