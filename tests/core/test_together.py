"""Several responses a pass: the scores of one at a time, within the budget, and what happens where memory runs out."""

from __future__ import annotations

import re
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

from grail_advantage import Grail, Method, Oar, TokenWeights, compute_token_weights
from grail_advantage.method import build
from grail_advantage.model import hugging_face
from tests.core import neighbours
from tests.core.common import some, watch_inputs
from tests.core.test_rlsd import SHORT, example, tiny_tokenizer
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, make_batch, tiny_model

FAMILIES = (
    *("qwen3", "qwen3_5_text", "gemma2", "gpt_oss", "phi3, longrope", "lfm2", "bloom", "doge", "llama", "mistral"),
    *("gemma3_text", "llama, dynamic", "recurrent_gemma", "mixtral, jitter", "opt, layerdrop", "minimax"),
)
OF_A_KIND = FAMILIES[:8]
"""Each method has two of them, and each kind of attention, position and state one; the others are nightly."""
ALONE = {"phi3, longrope", "llama, dynamic", "doge"}
"""Models whose responses depend on the longest one beside them, or on those after them."""
BATCH = [ROLLOUTS[name] for name in ("text after the box", "box at the end", "several boxes", "right", "empty box")]
SIGNALS: dict[str, Method] = {
    "grail": Grail(gate="all"),
    "grail, middle": Grail(preset="robust", gate="all", leaf="middle"),
    "oar_g": Oar("gradient", noise_std=0.05),
    "oar_p": Oar("perturbation"),
    "rlsd": build("rlsd", {"request": SHORT}),
    "shear": build("shear", {"window": 6, "stride": 3}),
    "surprisal": build("surprisal", {"gate": "all", "reshaper": "power"}),
    "entropy": build("entropy"),
}
CLOSE = {"oar_g": 1e-3, "oar_p": 1e-4, "rlsd": 1e-4}
"""Of a row's largest score, else 1e-5: a difference of two readings that are nearly the same has fewer digits, and its gradient
still fewer."""
FAILS = {
    ("bloom", "grail, middle"): "no get_decoder().layers",
    ("doge", "oar_p"): "its tokens see those after them, so that nothing is shared or cut exactly",
}
"""What does not work one at a time either."""


@cache
def model_of(name: str) -> PreTrainedModel:
    """In training mode, with whatever it draws at random there."""
    return neighbours.build(name).train()


def weigh_family(name: str, signal: str, tokens: int, padding: str) -> TokenWeights:
    """By at most so many tokens a forward, whatever the lengths of its rows."""
    batch = make_batch(BATCH, padding)
    with patch.object(hugging_face, "LEAST_LENGTH", 0.0):
        return compute_token_weights(
            model_of(name),
            tiny_tokenizer(),
            *batch.tensors(),
            SIGNALS[signal],
            temperature=0.9,
            groups=torch.zeros(len(BATCH), dtype=torch.int64),
            examples=[example(rollout.prompt) for rollout in BATCH],
            tokens=tokens,
        )


def difference(name: str, signal: str, padding: str = "right") -> float:
    """Largest difference of a score, as a part of the largest of its row."""
    alone, together = (weigh_family(name, signal, tokens, padding).scores for tokens in (1, 100_000))
    assert torch.equal(alone.isnan(), together.isnan()) and alone.nan_to_num().any()
    largest_B1 = alone.nan_to_num().abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return float(((together - alone).nan_to_num().abs() / largest_B1).max())


def goes_together(name: str) -> bool:
    """Whether the model's passes took several responses."""
    return hugging_face._findings[model_of(name)][1].holds


@pytest.mark.parametrize("name", some(FAMILIES, OF_A_KIND))
def test_scores_are_those_of_one_at_a_time(name: str) -> None:
    """GRAIL's on every architecture, and those of two more passes in turn."""
    for index, signal in enumerate(SIGNALS):
        if (name, signal) not in FAILS and (index == 0 or index % 4 == FAMILIES.index(name) % 4):
            found = difference(name, signal, ("left", "right", "both")[index % 3])
            assert found <= CLOSE.get(signal, 1e-5), signal
            assert found == 0 or name not in ALONE or signal == "oar_p", signal
    assert goes_together(name) == (name not in ALONE)


def weigh(model: nn.Module, rollouts: list[Rollout], signal: Any = None, **options: Any) -> torch.Tensor:
    batch = make_batch(rollouts)
    signal = signal if signal is not None else Grail("official")
    return compute_token_weights(model, char_tokenizer(), *batch.tensors(), signal, **options).weights


def test_forwards_keep_to_the_budget_and_hold_rows_of_like_length() -> None:
    """Each is its prompt and ten tokens, the last of which needs no forward; 16 tokens are less than three quarters of 22."""
    model = tiny_model()
    rollouts = [Rollout("a" * length, r"b\boxed{1}", -1.0) for length in (5, 40, 91, 12, 41, 6, 39)]
    weigh(model, rollouts, tokens=100)  # with the probe's forwards
    with watch_inputs(model.get_input_embeddings()) as shapes:
        weigh(model, rollouts, tokens=100)
    assert shapes == [(1, 100), (1, 50), (2, 49), (1, 21), (2, 15)]


def test_a_model_with_a_state_in_place_of_keys_and_values() -> None:
    """Its made-up sequences are run from their beginning."""
    model = neighbours.build("xlstm").eval()
    rollouts = [ROLLOUTS["box at the end"], ROLLOUTS["right"]]
    alone, together = (weigh(model, rollouts, Oar("perturbation"), tokens=tokens) for tokens in (1, 10_000))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert alone[0].unique().numel() > 3


class LooksAround(Qwen3ForCausalLM):
    """Its logits are the larger the more rows there are."""

    def forward(self, input_ids: torch.Tensor, **named: Any) -> Any:
        output = super().forward(input_ids, **named)
        output.logits = output.logits * (1 + len(input_ids) / 2)
        return output


def test_code_that_looks_at_its_neighbours_runs_one_at_a_time_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = LooksAround(tiny_model().config).eval()
    rollouts = [Rollout("Two?", rf"b\boxed{{{answer}}}", -1.0) for answer in range(3)]
    for _ in range(2):
        with watch_inputs(model.get_input_embeddings()) as shapes:
            weigh(model, rollouts)
        assert shapes[-3:] == [(1, 13)] * 3
    assert (
        len(re.findall("differ by .* of their spread .*: responses go through the model one at a time", caplog.text))
        == 1
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", [Grail("official"), Oar("perturbation")], ids=["rows", "counterfactuals"])
def test_less_goes_together_where_memory_runs_out(signal: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The budget is halved until the pass fits, stays so for the model, and the warning comes once."""
    hugging_face._warn_of_memory.cache_clear()
    model, rollouts = tiny_model(), [ROLLOUTS["text after the box"]] * 8
    expected = weigh(model, rollouts, signal)
    sizes: list[int] = []

    def run_out(_module: nn.Module, args: tuple, output_BSD: torch.Tensor) -> None:
        sizes.append(args[0].numel())
        if sizes[-1] > 100:
            raise torch.OutOfMemoryError("out of memory on purpose")

    handle = model.model.embed_tokens.register_forward_hook(run_out)
    for _ in range(2):
        torch.testing.assert_close(weigh(model, rollouts, signal), expected, rtol=1e-4, atol=1e-4)
    failed = [place for place, size in enumerate(sizes) if size > 100]
    assert 0 < len(failed) <= 6 and failed[-1] < len(sizes) / 2  # none in the second call
    assert caplog.text.count("memory ran out in a pass") == 1
    handle.remove()


@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, LooksAround], ids=["together", "one at a time"])
@pytest.mark.parametrize("backward_alone", [False, True], ids=["any pass", "with gradients"])
def test_what_no_smaller_pass_helps_is_raised(kind: type[Qwen3ForCausalLM], backward_alone: bool) -> None:
    model, tries = kind(tiny_model().config).eval(), []

    def fail(*_: Any) -> None:
        if torch.is_grad_enabled() or not backward_alone:
            tries.append(1)
            assert len(tries) < 30, "it is tried for ever"
            raise torch.OutOfMemoryError("out of memory on purpose")

    with pytest.raises(torch.OutOfMemoryError):
        handle = model.model.embed_tokens.register_forward_hook(fail)
        weigh(model, [ROLLOUTS["text after the box"]] * 8)
    handle.remove()
    assert len(weigh(model, [ROLLOUTS["text after the box"]])) == 1
