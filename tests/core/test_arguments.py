"""Models that the plain API refuses or reads as they are, and batches of nothing. Its arguments: ``test_doors.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn

from grail_advantage import Grail, Oar, compute_token_weights
from grail_advantage.method import build
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, plain_columns, tiny_model

PASSES = [Grail(gate="all"), Oar("perturbation"), build("surprisal", {"gate": "all", "statistics": "response"})]
"""With gradients, of made-up sequences, of the policy's log-probabilities."""
MODEL = cache(lambda: tiny_model(layers=1))
BATCH = make_batch([ROLLOUTS["right"]])


def surprisal(model: nn.Module) -> list[float]:
    return BATCH.of_responses(compute_token_weights(model, char_tokenizer(), *BATCH.tensors(), PASSES[2]).scores)[0]


def plain_surprisal(model: nn.Module) -> list[float]:
    inside = BATCH.response_mask[0].bool()
    prompt, response = BATCH.input_ids[0][~inside].tolist(), BATCH.input_ids[0][inside].tolist()
    return [-value for value in plain_columns(model, prompt, response, 1.0)[0]]


TASK = {"task_type": "CAUSAL_LM"}
ADAPTERS: list[PeftConfig] = [
    LoraConfig(**TASK, target_modules=["q_proj"], init_lora_weights=False, use_dora=True),
    PrefixTuningConfig(**TASK, num_virtual_tokens=3),
]


def refuse(model: nn.Module) -> None:
    for method in PASSES:
        with pytest.raises(ValueError):
            compute_token_weights(model, char_tokenizer(), *BATCH.tensors(), method)


def test_virtual_tokens_in_front_are_refused() -> None:
    config = PromptTuningConfig(**TASK, num_virtual_tokens=5)
    refuse(get_peft_model(tiny_model(layers=1), config))


@pytest.mark.parametrize("config", ADAPTERS, ids=lambda config: type(config).__name__)
def test_log_probs_of_an_adapter_are_its_own(config: PeftConfig) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(layers=1), config)
    expected = plain_surprisal(model)
    assert surprisal(model) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert plain_surprisal(MODEL()) != pytest.approx(expected, rel=1e-3, abs=1e-3)


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

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        if "prepended" in self.kind:
            vectors = self.inner.get_input_embeddings()(input_ids)
            output = self.inner(inputs_embeds=torch.cat([self.own.expand(len(vectors), -1, -1), vectors], dim=1))
        else:
            output = self.inner(input_ids=input_ids[:, self.kind.startswith("first token") :])
        output.logits = OTHER_POSITIONS.get(self.kind, lambda logits: logits)(output.logits)
        output.logits *= 0.5 if self.kind == "scaled" else 1
        return output


OTHER_POSITIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prepended": lambda logits: logits,
    "prepended, trimmed in front": lambda logits: logits[:, 3:],
    "prepended, trimmed behind": lambda logits: logits[:, :-3],
    "first token padded": lambda logits: torch.cat([logits[:, :1], logits], dim=1),
    "last": lambda logits: logits[:, -1:],
    "later": lambda logits: logits.roll(1, dims=1),
}


@pytest.mark.parametrize("kind", OTHER_POSITIONS)
def test_a_model_with_other_positions_is_refused(kind: str) -> None:
    refuse(Wrapped(kind))


def test_a_model_without_logits_is_refused_and_one_with_the_same_positions_read_as_it_is() -> None:
    refuse(MODEL().model)
    assert surprisal(Wrapped("plain")) == pytest.approx(plain_surprisal(MODEL()), rel=1e-4, abs=1e-4)
    # Behind its head, as Gemma's and Granite's.
    halved = Wrapped("scaled")
    assert surprisal(halved) == pytest.approx(plain_surprisal(halved), rel=1e-4, abs=1e-4)
