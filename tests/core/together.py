"""Responses one at a time against several together, on tiny models of many architectures drawn at random.

``python -m tests.core.together`` writes the table of ``docs/dev/models_measured.md``; ``test_together.py`` compares.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from grail_advantage import Grail, Method, Oar, TokenWeights, compute_token_weights
from grail_advantage.method import build
from grail_advantage.model import hugging_face
from recipe.marked_text import table, write_marked
from tests.core import neighbours
from tests.core.test_rlsd import SHORT, example, tiny_tokenizer
from tests.core.tiny_models import ROLLOUTS, make_batch

PAGE, MARKER = Path(__file__).parents[2] / "docs" / "dev" / "models_measured.md", "together"
FAMILIES = (
    *(
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_5_text",
        "llama",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "gpt_oss",
        "olmo2",
    ),
    *(
        "olmo3",
        "phi3, longrope",
        "llama, dynamic",
        "lfm2",
        "recurrent_gemma",
        "phimoe",
        "mixtral, jitter",
        "opt, layerdrop",
    ),
    *("bloom", "doge", "apertus", "cohere2", "glm4_moe", "granite", "minimax", "smollm3"),
)
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


def weigh(name: str, signal: str, tokens: int, padding: str) -> TokenWeights:
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
    alone, together = (weigh(name, signal, tokens, padding).scores for tokens in (1, 100_000))
    assert torch.equal(alone.isnan(), together.isnan()) and alone.nan_to_num().any()
    largest_B1 = alone.nan_to_num().abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return float(((together - alone).nan_to_num().abs() / largest_B1).max())


def goes_together(name: str) -> bool:
    """Whether the model's passes took several responses."""
    return hugging_face._findings[model_of(name)][1].holds


def page() -> str:
    """The table of the page."""
    rows = []
    for name in FAMILIES:
        cells = ["-" if (name, signal) in FAILS else f"{difference(name, signal):.0e}" for signal in SIGNALS]
        rows.append([name, "together" if goes_together(name) else "one at a time", *cells])
    return "\n".join(table(["model", "passes", *(f"`{signal}`" for signal in SIGNALS)], rows, right=2))


if __name__ == "__main__":
    write_marked(PAGE, MARKER, page())
