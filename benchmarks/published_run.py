"""What the published run does that this recipe's default does not (docs/published.md), at toy size.

    python -m benchmarks.published_run ratio --problems FILE.jsonl   # the importance ratio by length; FILE: GSM8K's test set
    python -m benchmarks.published_run switches                      # trainings, one switch at a time
    python -m benchmarks.published_run page                          # the recorded figures into docs/published.md

Shape suffixes: B responses, L prompt + response, T response tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector
from transformers import PreTrainedModel, PreTrainedTokenizerFast, get_scheduler

from benchmarks.timer import RESULTS, record, show, write
from grail_advantage import Grail, compute_token_weights
from recipe.data.specs import PROMPT_SUFFIX
from recipe.marked_text import table, write_marked
from verl_cpu.tiny.loss import Padded, add_gradient, group_advantages, padded, token_log_probs
from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, judge, prompt_ids, sample
from verl_cpu.tiny.shipped import HELD_OUT, TRAIN, load_shipped
from verl_cpu.tiny.smollm2 import load_smollm2
from verl_cpu.tiny.task import Problem, boxed_answer, problems

PAGE = Path(__file__).parents[1] / "docs" / "published.md"
PICTURE = PAGE.parent / "images" / "published_ratio.png"
TOP_K, CAP = 50, 3.0


class Rollouts(NamedTuple):
    """Responses with what the loss needs of them."""

    padded: Padded
    advantages_B: torch.Tensor
    truncated_B: torch.Tensor
    log_probs_BL: torch.Tensor
    """Of the policy that wrote them."""
    ratio_B: torch.Tensor
    """The product over a response's tokens of the policy's mass in its ``TOP_K`` likeliest: trainer / rollout probability."""


# --- the ratio by length


def measure_ratio(file: Path, questions: int, samples: int, longest: int) -> dict[str, Any]:
    """Tokens and log ratio of responses of both models at temperature 1."""
    lines = file.read_text(encoding="utf-8").splitlines()[:questions]
    gsm8k = [json.loads(line)["question"] + PROMPT_SUFFIX for line in lines]
    asked = [problem.text for problem in problems("train", questions, seed=0)]
    result = record("published_ratio", "cpu", " ".join(["python -m benchmarks.published_run", *sys.argv[1:]]))
    return result | {
        "questions": questions,
        "samples": samples,
        "models": {
            "the demo's model": _ratios(*load_shipped(), asked, samples, MAX_RESPONSE_TOKENS),
            "SmolLM2-135M": _ratios(*load_smollm2(), gsm8k, samples, longest),
        },
    }


def _ratios(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: Sequence[str], samples: int, longest: int
) -> dict[str, list[float]]:
    chats = [[{"role": "user", "content": text}] for text in asked for _ in range(samples)]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    found: dict[str, list[float]] = {"tokens": [], "log_ratio": []}
    for first in range(0, len(prompts), 32):
        some, drawn_BT = prompts[first : first + 32], np.random.default_rng(first).random((len(prompts), longest))
        for prompt, response in zip(some, sample(model, tokenizer, some, drawn_BT, top_k=TOP_K), strict=True):
            with torch.no_grad():
                logits_TV = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            found["tokens"].append(len(response))
            found["log_ratio"].append(float(log_mass(logits_TV, TOP_K).sum()))
        show(f"{len(found['tokens'])} of {len(prompts)} responses")
    return found


def log_mass(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The log of the policy's probability of its ``top_k`` likeliest tokens, (..., V) to (...).

    vLLM's ``processed_logprobs`` of a token that is drawn from these alone is the trainer's log-probability minus this, so that
    this is its part of the log ratio. vLLM 0.28 gave the same sums for 16 responses, to 2e-4 (2026-11-26).
    """
    return logits.double().log_softmax(dim=-1).topk(top_k).values.logsumexp(dim=-1)


# --- trainings


class Switches(NamedTuple):
    """One way to train."""

    warm_up: bool = False
    """``constant_with_warmup`` over a tenth of the updates: what the published file's ``warmup_steps: 20`` looks like."""
    ratio: bool = False
    """Each response's loss times its ratio."""
    every_epoch: bool = False
    """Weights anew in every epoch, with the policy as it then is."""
    top_k: int = TOP_K


RUNS = {
    "corrected": Switches(),
    "a warm-up, which is not published": Switches(warm_up=True),
    "ratio": Switches(ratio=True),
    "weights in every epoch": Switches(every_epoch=True),
    "published: both": Switches(ratio=True, every_epoch=True),
    "corrected, top_k 3": Switches(top_k=3),
    "ratio, top_k 3": Switches(top_k=3, ratio=True),
}
PROMPTS, GENERATIONS, EPOCHS, RATE = 16, 8, 4, 2e-4


def train(run: tuple[str, int, int]) -> dict[str, Any]:
    """Train the demo's model with switches of :data:`RUNS`, for a seed and a number of batches; what was measured."""
    name, seed, batches = run
    torch.set_num_threads(1)
    switches, (model, tokenizer) = RUNS[name], load_shipped()
    model.eval()  # it has no dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = get_scheduler(
        "constant_with_warmup" if switches.warm_up else "constant", optimizer, batches * EPOCHS // 10, batches * EPOCHS
    )
    asked, held_out = problems("train", TRAIN, seed=0), problems("validation", 2 * HELD_OUT, seed=1000 + seed)
    order, start = random.Random(seed), parameters_to_vector(model.parameters()).detach()
    accuracy, norms, moved, weights, ratios, first = [], [], [], [], [], None
    for batch in range(batches):
        rollouts = _roll_out(model, tokenizer, order.sample(asked, PROMPTS), seed, batch, switches.top_k)
        advantages_BL, weights_BL, scored_B = _weigh(model, tokenizer, rollouts)
        mask_BL = rollouts.padded.response_BL & scored_B[:, None]
        weights.append(weights_BL[mask_BL])
        ratios.append(rollouts.ratio_B)
        for epoch in range(EPOCHS):
            if epoch and switches.every_epoch:
                advantages_BL, now_BL, _ = _weigh(model, tokenizer, rollouts)
                if epoch == EPOCHS - 1:
                    moved.append(torch.stack([weights_BL[mask_BL], now_BL[mask_BL]]))
            _add_gradient(model, rollouts, advantages_BL, switches)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        if first is None:
            first = (parameters_to_vector(model.parameters()).detach() - start).tolist()
        if batch + 1 in (batches // 2, batches):
            accuracy.append(judge(model, tokenizer, held_out, seed=seed)["right"])
    weights_N, ratio_N = torch.cat(weights), torch.cat(ratios)
    found = {
        "run": name,
        "seed": seed,
        "accuracy": fmean(accuracy),
        "gradient_norm": float(np.median(norms)),
        "ratio": np.quantile(ratio_N, (0.05, 0.5, 0.95)).tolist(),
        "weight": np.quantile(weights_N, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist(),
        "at_bounds": [float((weights_N == bound).double().mean()) for bound in (0.5, 5.0)],
        "first": first,
        "change": (parameters_to_vector(model.parameters()).detach() - start).tolist(),
    }
    if moved:
        before_N, after_N = torch.cat(moved, dim=1).double()
        change_N = (after_N - before_N).abs() / before_N
        found["moved"] = {
            "correlation": float(torch.corrcoef(torch.stack([before_N, after_N]))[0, 1]),
            "median": float(change_N.median()),
            "q95": float(change_N.quantile(0.95)),
        }
    print(f"{name}, seed {seed}: {100 * found['accuracy']:.1f} %", flush=True)
    return found


def _roll_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[Problem],
    seed: int,
    batch: int,
    top_k: int,
) -> Rollouts:
    each = [problem for problem in asked for _ in range(GENERATIONS)]
    prompts = [prompt_ids(tokenizer, problem) for problem in each]
    drawn_BT = np.random.default_rng([seed, batch]).random((len(each), MAX_RESPONSE_TOKENS))
    responses = sample(model, tokenizer, prompts, drawn_BT, top_k=top_k)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards_B = torch.tensor(
        [float(boxed_answer(text) == str(one.answer)) for text, one in zip(texts, each, strict=True)]
    )
    batch = padded(prompts, responses, tokenizer.pad_token_id)
    truncated_B = torch.tensor([response[-1] != tokenizer.eos_token_id for response in responses])
    with torch.no_grad():
        log_probs_BL, log_probs_BLV = token_log_probs(model, batch.ids_BL)
    ratio_B = torch.where(batch.response_BL[:, 1:], log_mass(log_probs_BLV, top_k), 0.0).sum(dim=1).exp()
    advantages_B = group_advantages(rewards_B, truncated_B, GENERATIONS)
    return Rollouts(batch, advantages_B, truncated_B, pad(log_probs_BL, (1, 0)), ratio_B)


def _weigh(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rollouts: Rollouts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token advantages and weights (B, L), and which responses were scored (B,)."""
    given = model, tokenizer, *rollouts.padded, rollouts.advantages_B, Grail("official")
    found = compute_token_weights(*given, masked=rollouts.truncated_B)
    return found.advantages, found.weights, ~found.scores.isnan().all(dim=1)


def _add_gradient(model: PreTrainedModel, rollouts: Rollouts, advantages_BL: torch.Tensor, switches: Switches) -> None:
    """Each response's part times its ratio where that is asked for."""
    factor_B = torch.where(rollouts.ratio_B > CAP, 0.0, rollouts.ratio_B) if switches.ratio else None
    add_gradient(model, rollouts.padded, rollouts.log_probs_BL, advantages_BL, MAX_RESPONSE_TOKENS, factor_B)


def measure_switches(seeds: int, batches: int, processes: int) -> dict[str, Any]:
    """All of :data:`RUNS` for some seeds."""
    runs = [(name, seed, batches) for seed in range(seeds) for name in RUNS]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = list(pool.map(train, runs))
    base = {one["seed"]: one for one in found if one["run"] == "corrected"}
    start_model, tokenizer = load_shipped()
    for one in found:
        other = base[one["seed"]]
        for part in ("first", "change"):
            one[f"{part}_cosine"] = _cosine(one[part], other[part])
        one["change_norm"] = float(np.linalg.norm(one["change"]))
    for one in found:
        del one["first"], one["change"]
    command = " ".join(["python -m benchmarks.published_run", *sys.argv[1:]])
    held_out = problems("validation", 2 * HELD_OUT, seed=1000)
    start = judge(start_model, tokenizer, held_out, seed=0)["right"]
    settings = {"batches": batches, "prompts": PROMPTS, "generations": GENERATIONS, "epochs": EPOCHS, "rate": RATE}
    return record("published_switches", "cpu", command) | {"settings": settings, "start": start, "runs": found}


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


# --- the page


def ratio_table(result: dict[str, Any]) -> str:
    """The ratio of each quarter of a model's responses, by length."""
    rows = []
    for name, found in result["models"].items():
        order = np.argsort(found["tokens"], kind="stable")
        for part in np.array_split(order, 4):
            tokens, ratio = np.array(found["tokens"])[part], np.exp(np.array(found["log_ratio"])[part])
            quantiles = (f"{value:.3g}" for value in np.quantile(ratio, (0.05, 0.5, 0.95)))
            rows.append([name, len(part), f"{tokens.min()} to {tokens.max()}", *quantiles])
    return "\n".join(table(["model", "responses", "tokens", "ratio, 5 %", "median", "95 %"], rows, right=1))


def draw_ratio(result: dict[str, Any], path: Path) -> None:
    """Each response's ratio over its length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (name, found) in zip(axes, result["models"].items(), strict=True):
        axis.scatter(found["tokens"], np.exp(found["log_ratio"]), s=12, alpha=0.6, color="#2563a8", linewidths=0)
        few = min(found["log_ratio"]) > -1
        axis.set(
            title=name, xlabel="tokens of the response", ylabel="factor of its loss", yscale="linear" if few else "log"
        )
        axis.axhline(1, color="#888888", linewidth=0.8)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def switches_table(result: dict[str, Any]) -> str:
    """Each way to train: means over the seeds, and differences from ``corrected`` by seed."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for one in result["runs"]:
        by_run.setdefault(one["run"], []).append(one)
    base = by_run["corrected"]
    rows = []
    for name, runs in by_run.items():
        accuracy = [100 * one["accuracy"] for one in runs]
        gains = [100 * (one["accuracy"] - other["accuracy"]) for one, other in zip(runs, base, strict=True)]
        weight, ratio, bounds = (
            np.mean([one[key] for one in runs], axis=0) for key in ("weight", "ratio", "at_bounds")
        )
        rows.append(
            [
                name,
                f"{fmean(accuracy):.1f}",
                "" if name == "corrected" else ", ".join(f"{gain:+.1f}" for gain in gains),
                " / ".join(f"{value:.3f}" for value in ratio),
                " / ".join(f"{value:.2f}" for value in weight[[0, 2, 4]]),
                " / ".join(f"{100 * value:.1f}" for value in bounds),
                *(f"{fmean(one[key] for one in runs):.3f}" for key in ("first_cosine", "change_cosine", "change_norm")),
            ]
        )
    head = ["run", "accuracy, %", "minus `corrected`, by seed", "ratio, 5 / 50 / 95 %", "weights, 5 / 50 / 95 %"]
    head += ["at 0.5 / 5.0, %", "first update, cosine", "whole change, cosine", "its norm"]
    return "\n".join(table(head, rows, right=1))


def write_page() -> None:
    """The recorded figures as tables and picture."""
    ratio, switches = (
        json.loads((RESULTS / f"published_{kind}-cpu.json").read_text()) for kind in ("ratio", "switches")
    )
    draw_ratio(ratio, PICTURE)
    write_marked(PAGE, "ratio", f"{_how(ratio)}\n\n{ratio_table(ratio)}")
    moved = [one["moved"] for one in switches["runs"] if one["run"] == "weights in every epoch"]
    correlation, median, most = (fmean(one[key] for one in moved) for key in ("correlation", "median", "q95"))
    movement = (
        f"Between the first and the last epoch of a batch the weights of the scored responses have a correlation of "
        f"{correlation:.3f}; the median weight moves by {100 * median:.1f} %, one in twenty by more than {100 * most:.0f} %. "
        f"At the start {100 * switches['start']:.1f} % of the samples are correct."
    )
    write_marked(PAGE, "switches", f"{_how(switches)} {movement}\n\n{switches_table(switches)}")


def _how(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers"))
    return f"`{result['command']}`, {result['date']}, {result['hardware']}, {versions}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    ratio = kinds.add_parser("ratio")
    ratio.add_argument("--problems", type=Path, required=True, help="JSON Lines with `question`")
    ratio.add_argument("--questions", type=int, default=64)
    ratio.add_argument("--samples", type=int, default=4, help="of each question")
    ratio.add_argument("--longest", type=int, default=1024, help="tokens of a response of SmolLM2's")
    switches = kinds.add_parser("switches")
    switches.add_argument("--seeds", type=int, default=3)
    switches.add_argument("--batches", type=int, default=8)
    switches.add_argument("--processes", type=int, default=1)
    for kind in (ratio, switches):
        kind.add_argument("--output", type=Path, default=RESULTS, help="folder of the record (default: %(default)s)")
    kinds.add_parser("page")
    options = parser.parse_args()
    if any(value < 1 for value in vars(options).values() if isinstance(value, int)):
        parser.error("all numbers must be at least 1")
    if options.kind == "ratio":
        write(measure_ratio(options.problems, options.questions, options.samples, options.longest), options.output)
    elif options.kind == "switches":
        write(measure_switches(options.seeds, options.batches, options.processes), options.output)
    else:
        write_page()


if __name__ == "__main__":
    main()
