"""What compute_token_weights refuses, and batches without anything to weigh."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from grail_advantage.token_weights import response_statistics
from peft import (
    CPTConfig,
    IA3Config,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn

from grail_advantage import Grail, Oar, compute_token_weights
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, make_batch, tiny_model

PASSES = [Grail(gate="all"), Oar("perturbation")]
MODEL = cache(lambda: tiny_model(layers=1))
GOOD = vars(make_batch([ROLLOUTS["right"], ROLLOUTS["empty box"]])) | {"config": Grail()}


def with_values(name: str, *changes: tuple[int, int, float]) -> dict[str, torch.Tensor]:
    """The good argument, or log-probabilities of -0.5, with some values changed."""
    values_BL = GOOD.get(name, torch.full(GOOD["input_ids"].shape, -0.5)).clone()
    for row, place, value in changes:
        values_BL[row, place] = value
    return {name: values_BL}


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"input_ids": torch.zeros(5, dtype=torch.long)}, ["input_ids", "(B, L)", "(5,)"]),
    ({"input_ids": GOOD["input_ids"].tolist()}, ["input_ids must be a tensor, got list; use torch.tensor"]),
    ({"attention_mask": torch.ones(2, 7)}, ["attention_mask", "(2, 7)", "input_ids", "must agree"]),
    ({"response_mask": torch.ones(1, 3)}, ["response_mask", "(1, 3)", "input_ids", "must agree"]),
    ({"advantages": torch.zeros(3)}, ["advantages", "one number a response", "(2,)", "(3,)"]),
    ({"temperature": 0.0}, ["temperature=0.0", "greater than 0"]),
    ({"tokens": 0}, ["tokens=0", "at least 1", "alone"]),
    (with_values("attention_mask", (1, -1, 0)), ["response_mask", "padding", "attention_mask"]),
    (
        vars(make_batch([ROLLOUTS["right"], Rollout("", "a", -1.0)])),
        ["response 1", "no prompt token", "add at least one"],
    ),
    ({"old_log_probs": [0.0]}, ["old_log_probs must be a tensor, got list"]),
    # One is above 0, and one that nobody reads.
    (with_values("old_log_probs", (0, 0, 9.0), (1, -1, 0.5)), ["old_log_probs holds 0.5", "at most 0"]),
    ({"groups": torch.zeros(2)}, ["groups must hold whole numbers", "torch.float32", "torch.int64"]),
    ({"groups": torch.tensor([3, -2])}, ["groups", "-2", "at least 0", "torch.unique"]),
    ({"entropy": torch.zeros(2, 3)}, ["entropy", "(2, 3)", "input_ids", "must agree"]),
    ({"examples": []}, ["examples", "one a response", "2", "0"]),
    ({"masked": torch.zeros(3)}, ["masked", "one number a response", "(2,)", "(3,)"]),
    ({"rewards": torch.zeros(3)}, ["rewards", "one number a response", "(2,)", "(3,)"]),
    ({"rewards": torch.zeros(2, dtype=torch.bool)}, ["rewards must hold numbers", "torch.bool"]),
    ({"step": -1}, ["step=-1", "at least 0"]),
    ({"config": "grail"}, ["config='grail'", "Grail()", "grail_advantage.methods.method"]),
]


def test_refusals_name_the_argument_and_the_fix() -> None:
    for change, words in REFUSED:
        with pytest.raises(ValueError) as raised:
            compute_token_weights(MODEL(), char_tokenizer(), **GOOD | change)
        for word in words:
            assert word in str(raised.value)


TASK = {"task_type": "CAUSAL_LM"}
VIRTUAL: list[PeftConfig] = [
    PromptTuningConfig(**TASK, num_virtual_tokens=5),
    PromptEncoderConfig(**TASK, num_virtual_tokens=1, encoder_hidden_size=16),
    PrefixTuningConfig(**TASK, num_virtual_tokens=3),
    MultitaskPromptTuningConfig(**TASK, num_virtual_tokens=3, num_tasks=2),
    CPTConfig(**TASK, cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2]),
]
ADAPTERS: list[PeftConfig] = [
    LoraConfig(**TASK, target_modules=["q_proj"], init_lora_weights=False),
    LoraConfig(**TASK, target_modules=["q_proj"], init_lora_weights=False, use_dora=True),
    IA3Config(**TASK, target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
]


@pytest.mark.parametrize("config", VIRTUAL, ids=lambda config: type(config).__name__)
def test_virtual_tokens_are_refused(config: PeftConfig) -> None:
    model, batch = get_peft_model(tiny_model(layers=1), config), make_batch([ROLLOUTS["right"]])
    calls = [partial(compute_token_weights, model, char_tokenizer(), *batch.tensors(), signal) for signal in PASSES]
    calls.append(partial(response_statistics, model, char_tokenizer(), *batch.tensors()[:3]))
    for call in calls:
        with pytest.raises(ValueError, match=rf"virtual tokens \({type(config).__name__}\).*; use .* LoRA"):
            call()


@pytest.mark.parametrize("config", ADAPTERS, ids=lambda config: type(config).__name__)
def test_log_probs_of_an_adapter_are_its_own(config: PeftConfig) -> None:
    torch.manual_seed(0)
    model, batch = get_peft_model(tiny_model(layers=1), config), make_batch([ROLLOUTS["right"]])
    found_BL, _ = response_statistics(model, char_tokenizer(), *batch.tensors()[:3])
    with torch.no_grad():
        log_probs_LV = model(input_ids=batch.input_ids).logits[0].log_softmax(-1)
        plain_LV = tiny_model(layers=1)(input_ids=batch.input_ids).logits[0].log_softmax(-1)
    ids_1L, mask_L = batch.input_ids[0, 1:, None], batch.response_mask[0, 1:].bool()
    expected, without = (values[:-1].gather(1, ids_1L)[mask_L, 0] for values in (log_probs_LV, plain_LV))
    torch.testing.assert_close(found_BL[0, 1:][mask_L], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, without, atol=1e-3)


def test_batches_without_any_response_or_row() -> None:
    batch = make_batch([ROLLOUTS["no response"]] * 2)
    got = compute_token_weights(MODEL(), char_tokenizer(), *batch.tensors(), Grail())
    assert got.weights.tolist() == [[0.0] * 13] * 2
    assert got.scores.isnan().all()
    assert got.spans == [None, None]
    assert got.stats == {}
    none = torch.zeros(0, 5, dtype=torch.long)
    got = compute_token_weights(MODEL(), char_tokenizer(), none, none, none, torch.zeros(0), Grail())
    assert got.weights.shape == got.scores.shape == (0, 5)
    assert (got.spans, got.stats) == ([], {})


class Wrapped(nn.Module):
    """A language model with positions of its own, as wrappers for soft prompts, distillation or labels have them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = tiny_model(layers=1), kind
        self.own = nn.Parameter(torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
        if self.kind in ("prepended", "trimmed in front", "trimmed behind"):
            vectors = self.inner.get_input_embeddings()(input_ids)
            output = self.inner(inputs_embeds=torch.cat([self.own.expand(len(vectors), -1, -1), vectors], dim=1))
            parts = {"trimmed in front": slice(3, None), "trimmed behind": slice(0, -3)}
            output.logits = output.logits[:, parts.get(self.kind, slice(None))]
            return output
        if self.kind.startswith("first token"):
            output = self.inner(input_ids=input_ids[:, 1:])
            if self.kind == "first token padded":
                output.logits = torch.cat([output.logits[:, :1], output.logits], dim=1)
            return output
        output = self.inner(input_ids=input_ids)
        changes: dict[str, Any] = {
            "plain": lambda logits: logits,
            "scaled": lambda logits: logits * 0.5,
            "last": lambda logits: logits[:, -1:],
            "without the last": lambda logits: logits[:, :-1],
            "later": lambda logits: logits.roll(1, dims=1),
            "earlier": lambda logits: torch.cat([logits[:, 1:], logits[:, :1]], dim=1),
        }
        output.logits = changes[self.kind](output.logits)
        return output


OTHER_POSITIONS = [
    *("prepended", "trimmed in front", "trimmed behind", "first token", "first token padded", "last"),
    *("without the last", "later", "earlier", "scaled"),
]


@pytest.mark.parametrize("kind", OTHER_POSITIONS)
def test_a_model_with_other_positions_is_refused(kind: str) -> None:
    batch = make_batch([ROLLOUTS["right"]])
    calls = [partial(compute_token_weights, Wrapped(kind), char_tokenizer(), *batch.tensors(), each) for each in PASSES]
    calls.append(partial(response_statistics, Wrapped(kind), char_tokenizer(), *batch.tensors()[:3]))
    for call in calls:
        with pytest.raises(
            ValueError, match=r"model \(Wrapped\) has other positions than its input, or other.*; pass the causal"
        ):
            call()


def test_a_model_without_logits_is_refused() -> None:
    batch = make_batch([ROLLOUTS["right"]])
    with pytest.raises(ValueError, match=r"model \(Qwen3Model\) gives no logits .*; pass a causal language model"):
        response_statistics(MODEL().model, char_tokenizer(), *batch.tensors()[:3])


def test_a_wrapper_with_the_same_positions_is_read_as_it_is() -> None:
    batch, model = make_batch([ROLLOUTS["right"]]), Wrapped("plain")
    found_BL, _ = response_statistics(model, char_tokenizer(), *batch.tensors()[:3])
    with torch.no_grad():
        log_probs_LV = model(input_ids=batch.input_ids).logits[0].log_softmax(-1)
    mask_L = batch.response_mask[0, 1:].bool()
    expected = log_probs_LV[:-1].gather(1, batch.input_ids[0, 1:, None])[mask_L, 0]
    torch.testing.assert_close(found_BL[0, 1:][mask_L], expected, rtol=1e-4, atol=1e-4)
