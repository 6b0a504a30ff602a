"""Part a: torch, transformers and pydantic alone. Token weights in bfloat16 against float32, and what each pass costs.

Models of published shapes have random weights: of precision they show how rounding goes through that many layers of
that width, not how it acts on a trained model. Shape suffixes: N tokens with a score.
"""

import math
from contextlib import suppress
from statistics import median

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.gpu_check.__main__ import Outcome
from benchmarks.setup import Setup, random_model, release
from benchmarks.timer import peak_memory, seconds
from grail_advantage import Grail, Method, Oar
from grail_advantage.api import PlainHost
from grail_advantage.data import Rollouts, Weighed
from grail_advantage.effect import rank_correlation
from grail_advantage.weigh import weigh

JUDGED: dict[str, Method] = {"grail, official": Grail("official"), "grail, robust": Grail("robust")}
"""Methods whose weights bfloat16 must keep. OAR-G's noise is near bfloat16's rounding, so it has no limit."""
METHODS = JUDGED | {
    f"oar_g, {name}": Oar("gradient", variant=name) for name in ("official", "grail_port")
}
MOST = 0.04
LEAST = 0.995
"""Most mean absolute difference of weights, as a share of their own deviation, and least rank correlation of scores."""
SHARE = "mean by deviation"
RANK = "rank correlation of the scores"
PEAK = "peak, GiB"


def run(outcome: Outcome, device: str) -> None:
    """All checks of the part; on the CPU at toy size."""
    full = device == "cuda"
    # No TF32
    torch.set_float32_matmul_precision("highest")
    with outcome.attempt("weights of the device against the CPU"):
        small = "small" if full else "toy"
        model = random_model(small, "cpu", torch.float32)
        rollouts = incorrect(small, 2, 192)
        for name, method in JUDGED.items():
            expected, actual = (
                weights(model.to(where), method, rollouts).weights for where in ("cpu", device)
            )
            error = float((actual - expected).abs().max())
            outcome.check(
                f"{name}: the device's weights are the CPU's",
                error <= 1e-3,
                f"off by {error:.1e}, allowed 1e-3",
            )
    for shape in ("Qwen3-0.6B", "Qwen3-4B") if full else ("toy",):
        with outcome.attempt(f"{shape}: weights in bfloat16 against float32"):
            model = random_model(shape, device, torch.float32)
            rollouts = incorrect(shape, 4, 1024 if full else 80)
            precision(outcome, f"{shape}, random", model, rollouts)
            del model
        release()
        with outcome.attempt(f"{shape}: time and memory of the passes"):
            passes(outcome, shape, device, 4096 if full else 80)
        release()


def incorrect(shape: str, rows: int, tokens: int) -> Rollouts:
    """Responses that all have scores."""
    return Setup(
        "cpu", shape, rows, tokens, prompt=128 if tokens > 1000 else 16, micro_batch_rows=1
    ).rollouts(rows)


def weights(model: PreTrainedModel, method: Method, rollouts: Rollouts) -> Weighed:
    """Scores and weights of the responses."""
    return weigh(rollouts, method, PlainHost(model, rollouts, device=model.device))


def precision(
    outcome: Outcome, name: str, model: PreTrainedModel, rollouts: Rollouts, least: float = LEAST
) -> None:
    """Weights of one model in float32 and with its parameters rounded to bfloat16, which they are afterwards."""
    exact = {label: weights(model, method, rollouts) for label, method in METHODS.items()}
    for parameter in model.parameters():
        # Not the buffers: rotary frequencies stay in float32, as they do where a checkpoint is loaded in bfloat16.
        parameter.data = parameter.data.to(torch.bfloat16)
    rounded = {
        label: compared(weights(model, method, rollouts), exact[label])
        for label, method in METHODS.items()
    }
    outcome.figures(
        f"Precision, {name}", rounded, "Token weights in bfloat16 less those in float32."
    )
    for label in JUDGED:
        share = rounded[label][SHARE]
        rank = rounded[label][RANK]
        detail = f"off by {share:.1%} of their deviation (at most {MOST:.0%}), rank correlation {rank:.4f} (at least {least})"
        outcome.check(
            f"{name}, {label}: bfloat16 keeps the weights", share <= MOST and rank >= least, detail
        )


def compared(actual: Weighed, exact: Weighed) -> dict[str, float]:
    """How far weights are off, on average over the tokens that have scores, and Spearman's correlation of the scores."""
    scored_BT = ~exact.scores.isnan()
    exact_N = exact.weights[scored_BT]
    error_N = (actual.weights[scored_BT] - exact_N).abs()
    correlations = []
    for row, scored_T in enumerate(scored_BT):
        pair = [weighed.scores[row, scored_T].numpy() for weighed in (actual, exact)]
        correlations.append(rank_correlation(*pair))
    return {SHARE: float(error_N.mean() / exact_N.std()), RANK: median(correlations)}


def passes(outcome: Outcome, shape: str, device: str, tokens: int) -> None:
    """Seconds and peak memory of every pass over one response, with gradient checkpointing off and on. GRAIL's must fit
    wherever training fits, and checkpointing must save it memory."""
    model = random_model(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    rollouts = incorrect(shape, 1, tokens)
    ids_1L = torch.cat([rollouts.prompts[0], rollouts.responses[0]])[None].to(device)
    ways = {
        "forward": lambda: torch.no_grad()(summed_loss)(model, ids_1L),
        "training": lambda: summed_loss(model.train(), ids_1L).backward(),
        "grail": lambda: weights(model, METHODS["grail, official"], rollouts),
        "oar_g": lambda: weights(model, METHODS["oar_g, official"], rollouts),
    }
    measured = {}
    for suffix in ("", ", checkpointed"):
        if suffix:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        for name, way in ways.items():
            label = name + suffix
            measured[label] = {PEAK: math.inf}
            with suppress(torch.cuda.OutOfMemoryError):
                peak = peak_memory(device, way) / 2**30
                durations = []
                for _ in range(3):
                    model.eval().zero_grad()
                    durations.append(seconds(device, way))
                ratio = median(durations) / median(measured["forward"].get("seconds", durations))
                measured[label] = {"seconds": durations, "x the forward": ratio, PEAK: peak}
            # The gradients of training would count in the next pass's peak.
            model.eval().zero_grad()
            release()
    outcome.figures(
        f"Passes, {shape}", measured, f"One response of {tokens} tokens; inf: does not fit."
    )
    for cheaper, dearer in (
        ("grail", "training"),
        ("grail, checkpointed", "training, checkpointed"),
        ("grail, checkpointed", "grail"),
    ):
        less = measured[cheaper][PEAK]
        more = measured[dearer][PEAK]
        detail = f"{less:.4g} GiB and {more:.4g} GiB"
        holds = less < more or less == math.inf == more
        outcome.check(f"{shape}: {cheaper} needs less memory than {dearer}", holds, detail)


def summed_loss(model: PreTrainedModel, ids_1L: torch.Tensor) -> torch.Tensor:
    """A forward with logits everywhere, and the summed loss of all tokens."""
    logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0, :-1]
    parts = zip(logits_LV.split(512), ids_1L[0, 1:].split(512), strict=True)
    return sum(
        F.cross_entropy(part_KV.float(), tokens_K, reduction="sum") for part_KV, tokens_K in parts
    )
