"""Part a: torch, transformers and pydantic alone. Token weights in bfloat16 against float32, and what each pass costs.

Models of published shapes have random weights: of precision they show how rounding goes through that many layers of that
width, not how it acts on a trained model.

Shape suffixes: N tokens with a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.gpu_check.outcome import Outcome, cell
from benchmarks.made_up import SHAPES, made_up_rollouts, random_model, release
from benchmarks.timer import peak_memory, seconds
from grail_advantage import Grail, Method, Oar
from grail_advantage.api import PlainHost
from grail_advantage.data import Rollouts, Weighed
from grail_advantage.weigh import weigh

METHODS: dict[str, Method] = {
    "grail, official": Grail("official"),
    "grail, robust": Grail("robust"),
    "oar_g, official": Oar("gradient"),
    "oar_g, grail_port": Oar("gradient", variant="grail_port"),
}
JUDGED = ("grail, official", "grail, robust")
"""Methods whose weights bfloat16 must keep. OAR-G's noise is near bfloat16's rounding, so it has no limit."""
MOST, LEAST = 0.04, 0.995
"""For these methods: most mean absolute difference of the weights, as a share of the weights' own deviation, and least rank
correlation of the scores, where weights of the model are random."""
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
            precision(outcome, f"{shape}, random", model, incorrect(*size.weighed, size.prompt, shape), list(METHODS))
            del model
        release()
        with outcome.attempt(f"{shape}: time and memory of the passes"):
            passes(outcome, shape, device, size)
        release()


def incorrect(rows: int, tokens: int, prompt: int, shape: str) -> Rollouts:
    """Responses that all have scores."""
    return made_up_rollouts(rows, tokens, prompt, SHAPES[shape]["vocab_size"], selected=rows)


def weights(model: PreTrainedModel, method: Method, rollouts: Rollouts) -> Weighed:
    """Scores and weights of the responses."""
    return weigh(PlainHost(model, rollouts, device=model.device), method, None)


def against_cpu(outcome: Outcome, device: str, size: Size) -> None:
    """The same small model on the device and on the CPU, both in float32."""
    model, rollouts = random_model(SHAPES[size.small], "cpu", torch.float32), incorrect(2, 192, 16, size.small)
    for name in JUDGED:
        expected, actual = (weights(model.to(where), METHODS[name], rollouts).weights for where in ("cpu", device))
        error = float((actual - expected).abs().max())
        outcome.check(
            f"{name}: weights of the device are the CPU's", error <= 1e-3, f"off by {error:.1e}, allowed 1e-3"
        )


def precision(
    outcome: Outcome,
    name: str,
    model: PreTrainedModel,
    rollouts: Rollouts,
    methods: Sequence[str],
    least: float = LEAST,
) -> None:
    """Weights of one model in float32 and with its parameters rounded to bfloat16, which they are afterwards."""
    exact = {method: weights(model, METHODS[method], rollouts) for method in methods}
    for parameter in model.parameters():
        # Not the buffers: rotary frequencies stay in float32, as they do where a checkpoint is loaded in bfloat16.
        parameter.data = parameter.data.to(torch.bfloat16)
    found = {method: compared(weights(model, METHODS[method], rollouts), exact[method]) for method in methods}
    note = "Token weights in bfloat16 less those in float32, over the scored tokens."
    outcome.figures(f"Precision, {name}", found, note)
    for method in JUDGED:
        outcome.check(f"{name}, {method}: bfloat16 keeps the weights", *kept(found[method], least))


def kept(of_method: Mapping[str, float], least: float = LEAST) -> tuple[bool, str]:
    """Whether a method's weights in bfloat16 are within the limits, and the figures."""
    rank = of_method["rank correlation of the scores"]
    share = of_method["mean"] / of_method["the weights' own deviation"]
    detail = f"off by {share:.1%} of their deviation (at most {MOST:.0%})"
    return share <= MOST and rank >= least, f"{detail}, scores' rank correlation {rank:.4f} (at least {least})"


def compared(actual: Weighed, exact: Weighed) -> dict[str, float]:
    """How far weights are off, over the tokens that have scores."""
    scored_BT = ~exact.scores.isnan()
    error_N = (actual.weights - exact.weights)[scored_BT].abs()
    rows = zip(actual.scores, exact.scores, scored_BT, strict=True)
    return {
        "mean": float(error_N.mean()),
        "99 % below": float(error_N.quantile(0.99)),
        "largest": float(error_N.max()),
        "the weights' own deviation": float(exact.weights[scored_BT].std()),
        "rank correlation of the scores": median([rank_correlation(a_T[at_T], b_T[at_T]) for a_T, b_T, at_T in rows]),
    }


def rank_correlation(a_N: torch.Tensor, b_N: torch.Tensor) -> float:
    """Spearman's, for values without ties."""
    ranks_2N = torch.stack([a_N.argsort().argsort(), b_N.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks_2N)[0, 1])


def passes(outcome: Outcome, shape: str, device: str, size: Size) -> None:
    """Seconds and peak memory of every pass over one response, with gradient checkpointing off and on. A saliency pass must fit
    wherever training fits, and checkpointing must save it memory."""
    model = random_model(SHAPES[shape], device, torch.bfloat16 if device == "cuda" else torch.float32)
    rollouts = incorrect(1, size.tokens, size.prompt, shape)
    ids_1L = torch.cat([rollouts.prompts[0], rollouts.responses[0]])[None].to(device)
    base = peak_memory(device, lambda: None)
    ways = {
        "forward": lambda: torch.no_grad()(summed_loss)(model, ids_1L),
        "training": lambda: training_pass(model, ids_1L),
        "grail": lambda: weights(model, METHODS["grail, official"], rollouts),
        "oar_g": lambda: weights(model, METHODS["oar_g, official"], rollouts),
    }
    measured: dict[str, dict[str, Any]] = {}
    for label in (*ways, *(f"{name}, checkpointed" for name in ways)):
        name, _, checkpointed = label.partition(", ")
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            peak = peak_memory(device, ways[name])
            taken = [seconds(device, ways[name]) for _ in range(size.repeats)]
            forward = median(measured["forward"]["seconds"] if measured else taken)
            measured[label] = {
                "seconds": taken,
                "x the forward": median(taken) / forward,
                "peak, GiB": peak / 2**30,
                "above the parameters": (peak - base) / 2**30,
            }
        except torch.cuda.OutOfMemoryError:
            measured[label] = {"peak, GiB": OUT_OF_MEMORY}
        model.eval().zero_grad(set_to_none=True)
        release()
        note = f"Shape of {shape}, one response of {size.tokens} tokens; {base / 2**30:.2f} GiB are parameters."
        outcome.figures(f"Passes, {shape}", measured, note)
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


def summed_loss(model: PreTrainedModel, ids_1L: torch.Tensor) -> torch.Tensor:
    """A forward with logits everywhere, and the summed loss of all tokens."""
    logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0, :-1]
    parts = zip(logits_LV.split(512), ids_1L[0, 1:].split(512), strict=True)
    return sum(F.cross_entropy(part_KV.float(), tokens_K, reduction="sum") for part_KV, tokens_K in parts)


def training_pass(model: PreTrainedModel, ids_1L: torch.Tensor) -> None:
    """A forward and a backward to every parameter."""
    summed_loss(model.train(), ids_1L).backward()
    model.eval().zero_grad(set_to_none=True)
