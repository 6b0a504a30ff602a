"""Part a: torch and transformers alone. Token weights in bfloat16 against float32, and what each pass costs.

Models of published shapes with random weights, built here: nothing is downloaded. Random weights take the time and memory
of trained ones; of precision they show how rounding goes through that many layers of that width, not how it acts on a trained
model.

Shape suffixes: B responses, L prompt + response, V vocabulary, N tokens with a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.gpu_check.outcome import Outcome, cell
from benchmarks.measuring import Clock, peak_memory
from benchmarks.random_model import SHAPES, byte_letters, random_model, release, wordy_tokenizer
from grail_advantage import Grail, Oar, Signal, TokenWeights, compute_token_weights

METHODS: dict[str, Signal] = {
    "grail, official": Grail("official"),
    "grail, robust": Grail("robust"),
    "oar_g, official": Oar("gradient"),
    "oar_g, grail_port": Oar("gradient", variant="grail_port"),
}
JUDGED = ("grail, official", "grail, robust")
"""Methods whose weights bfloat16 must keep. OAR-G's noise is near bfloat16's rounding, so it has no limit."""
LIMITS = 0.01, 0.995
"""For these methods: most mean absolute difference of the weights, and least rank correlation of the scores."""
ANSWER = r"\boxed{42}"
AFTER_ANSWER = 16
OUT_OF_MEMORY = "out of memory"


class Size(NamedTuple):
    """Shapes, and the one that is compared with the CPU; responses and tokens where weights are compared; tokens where passes
    are measured."""

    shapes: tuple[str, ...]
    small: str
    weighed: tuple[int, int]
    tokens: int
    prompt: int
    repeats: int


FULL = Size(("Qwen3-0.6B", "Qwen3-4B"), "small", weighed=(4, 1024), tokens=4096, prompt=128, repeats=3)
TOY = Size(("toy",), "toy", weighed=(2, 80), tokens=80, prompt=16, repeats=2)


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part; on the CPU at toy size."""
    size = FULL if device == "cuda" else TOY
    torch.set_float32_matmul_precision("highest")  # no TF32
    with outcome.attempt("weights of the device against the CPU"):
        against_cpu(outcome, device, size)
    for shape in size.shapes:
        with outcome.attempt(f"{shape}: weights in bfloat16 against float32"):
            model = random_model(SHAPES[shape], device, torch.float32)
            rows = random_rows(*size.weighed, size.prompt, SHAPES[shape]["vocab_size"], device)
            precision(outcome, f"{shape}, random", model, partial(weights, model, rows=rows), list(METHODS), LIMITS)
        release()
        with outcome.attempt(f"{shape}: time and memory of the passes"):
            passes(outcome, shape, device, size)
        release()


def against_cpu(outcome: Outcome, device: str, size: Size) -> None:
    """The same small model on the device and on the CPU, both in float32."""
    model = random_model(SHAPES[size.small], "cpu", torch.float32)
    rows = random_rows(2, 192, 16, SHAPES[size.small]["vocab_size"], "cpu")
    for name in JUDGED:
        expected = weights(model, METHODS[name], rows)
        actual = weights(model.to(device), METHODS[name], tuple(tensor.to(device) for tensor in rows))
        model.to("cpu")
        error = float((actual.weights.cpu() - expected.weights).abs().max())
        outcome.check(
            f"{name}: weights of the device are the CPU's", error <= 1e-3, f"off by {error:.1e}, allowed 1e-3"
        )


def precision(
    outcome: Outcome,
    name: str,
    model: PreTrainedModel,
    weigh: Callable[[Signal], TokenWeights],
    methods: Sequence[str],
    limits: tuple[float, float] | None,
) -> None:
    """Weights of one model in float32 and with its parameters rounded to bfloat16, which they are afterwards. Without
    ``limits`` nothing is judged."""
    exact = {method: weigh(METHODS[method]) for method in methods}
    for parameter in model.parameters():
        # Not the buffers: rotary frequencies stay in float32, as they do where a checkpoint is loaded in bfloat16.
        parameter.data = parameter.data.to(torch.bfloat16)
    table = {method: compared(weigh(METHODS[method]), exact[method]) for method in methods}
    note = "Token weights in bfloat16 less those in float32, over the scored tokens."
    outcome.figures(f"Precision, {name}", table, note)
    for method in JUDGED if limits else ():
        (most, least), error, rank = limits, table[method]["mean"], table[method]["rank correlation of the scores"]
        found = (
            f"off by {error:.4f} on average (at most {most}), scores' rank correlation {rank:.4f} (at least {least})"
        )
        outcome.check(f"{name}, {method}: bfloat16 keeps the weights", error <= most and rank >= least, found)


def compared(actual: TokenWeights, exact: TokenWeights) -> dict[str, float]:
    """How far weights are off, over the tokens that have scores."""
    scored_BL = ~exact.scores.isnan()
    error_N = (actual.weights - exact.weights)[scored_BL].abs()
    return {
        "mean": float(error_N.mean()),
        "99 % below": float(error_N.quantile(0.99)),
        "largest": float(error_N.max()),
        "the weights' own deviation": float(exact.weights[scored_BL].std()),
        "rank correlation of the scores": median(
            [
                rank_correlation(ours_L[there_L], theirs_L[there_L])
                for ours_L, theirs_L, there_L in zip(actual.scores, exact.scores, scored_BL, strict=True)
            ]
        ),
    }


def rank_correlation(a_N: torch.Tensor, b_N: torch.Tensor) -> float:
    """Spearman's, for values without ties."""
    ranks_2N = torch.stack([a_N.argsort().argsort(), b_N.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks_2N)[0, 1])


def passes(outcome: Outcome, shape: str, device: str, size: Size) -> None:
    """Seconds and peak memory of every pass over one response, with gradient checkpointing off and on."""
    model = random_model(SHAPES[shape], device, torch.bfloat16 if device == "cuda" else torch.float32)
    rows = random_rows(1, size.tokens, size.prompt, SHAPES[shape]["vocab_size"], device)
    base = peak_memory(device, lambda: None)
    clock = Clock(device)
    measured: dict[str, dict[str, Any]] = {}
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ways = {
            "forward": lambda: torch.no_grad()(forward_pass)(model, rows[0]),
            "training": lambda: training_pass(model, rows[0]),
            "grail": lambda: weights(model, METHODS["grail, official"], rows),
            "oar_g": lambda: weights(model, METHODS["oar_g, official"], rows),
        }
        for name, way in ways.items():
            label = f"{name}, checkpointed" if checkpointing else name
            try:
                peak = peak_memory(device, way)
                seconds = [clock.seconds(way) for _ in range(size.repeats)]
                forward = median(measured["forward"]["seconds"]) if measured else median(seconds)
                measured[label] = {
                    "seconds": seconds,
                    "x the forward": median(seconds) / forward,
                    "peak, GiB": peak / 2**30,
                    "above the parameters": (peak - base) / 2**30,
                }
            except torch.cuda.OutOfMemoryError:
                measured[label] = {"peak, GiB": OUT_OF_MEMORY}
            model.zero_grad(set_to_none=True)
            release()
            note = f"Shape of {shape}, one response of {size.tokens} tokens; {base / 2**30:.2f} GiB are parameters."
            outcome.figures(f"Passes, {shape}", measured, note)
    _judge_passes(outcome, shape, measured)


def _judge_passes(outcome: Outcome, shape: str, measured: dict[str, dict[str, Any]]) -> None:
    """A saliency pass must fit wherever training fits, and checkpointing must save it memory."""
    for smaller, larger in (
        ("grail", "training"),
        ("grail, checkpointed", "training, checkpointed"),
        ("grail, checkpointed", "grail"),
    ):
        peaks = [measured[way]["peak, GiB"] for way in (smaller, larger)]
        fits = [peak != OUT_OF_MEMORY for peak in peaks]
        less = peaks[0] < peaks[1] if all(fits) else fits[0] or not fits[1]
        said = f"{smaller}: {cell(peaks[0])} GiB, {larger}: {cell(peaks[1])} GiB"
        outcome.check(f"{shape}: {smaller} needs less memory than {larger}", less, said)


def forward_pass(model: PreTrainedModel, input_ids_1L: torch.Tensor) -> torch.Tensor:
    """The forward with logits everywhere, and the summed loss of all tokens."""
    logits_LV = model(input_ids=input_ids_1L, use_cache=False).logits[0, :-1]
    parts = zip(logits_LV.split(512), input_ids_1L[0, 1:].split(512), strict=True)
    return sum(F.cross_entropy(part_KV.float(), tokens_K, reduction="sum") for part_KV, tokens_K in parts)


def training_pass(model: PreTrainedModel, input_ids_1L: torch.Tensor) -> None:
    """A forward and a backward to every parameter."""
    model.train()
    try:
        forward_pass(model, input_ids_1L).backward()
        model.zero_grad(set_to_none=True)
    finally:
        model.eval()


def weights(model: PreTrainedModel, signal: Signal, rows: tuple[torch.Tensor, ...]) -> TokenWeights:
    """Token weights of responses from :func:`random_rows`."""
    return compute_token_weights(model, wordy_tokenizer(model.config.vocab_size), *rows, signal)


def random_rows(rows: int, tokens: int, prompt: int, vocabulary: int, device: str) -> tuple[torch.Tensor, ...]:
    """Responses of random words that end in an answer and a few words after it, all of them incorrect, as
    :func:`grail_advantage.compute_token_weights` takes them: ids, attention mask and response mask (B, L), advantages (B,)."""
    tokenizer = wordy_tokenizer(vocabulary)
    answer = torch.tensor(tokenizer.encode(ANSWER, add_special_tokens=False))
    generator = torch.Generator().manual_seed(0)
    input_ids_BL = torch.randint(len(byte_letters()), vocabulary - 3, (rows, tokens), generator=generator)
    start = tokens - AFTER_ANSWER - len(answer)
    input_ids_BL[:, start : start + len(answer)] = answer
    response_BL = (torch.arange(tokens) >= prompt).expand(rows, -1).long()
    tensors = (input_ids_BL, torch.ones_like(input_ids_BL), response_BL, -torch.ones(rows))
    return tuple(tensor.to(device) for tensor in tensors)
