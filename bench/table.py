"""The table: reads a folder of ``analyze``, and gives each method its figures beside their controls, and a verdict.

An incorrect solution with a first error is an error, a correct one without is a control; others are counted. All have the
advantage -1, as if an incorrect answer had been sampled: where does the method put the blame?

Shape suffixes: T response tokens, M steps, W errors, C controls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from bench.places import FIGURES, Label, among, record
from bench.statistics import Estimate, above_controls, holm, mean_of
from grail_advantage.analyze.command import record_in
from grail_advantage.answers.missing import is_low
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.text_io import table

FEWEST = 10  # problems below which nothing is said of a method, and controls of a response
LEAST_SCORED, SIGNIFICANT = 0.5, 0.05
FINDS, SPARES, PLACED, NOTHING = "finds errors", "blames errors least", "not told from place or kind", "not shown"
ALIKE, FEW, UNSCORED = "treats a response's tokens alike", f"fewer than {FEWEST} problems", "scores less than half"
CONTROLS = {"gain": "shuffled", "earlier": "earlier first", "later": "later first", "kinds": "its kinds"}
CONTROLS |= {"above": "equal place"}  # differences of ``step`` that must all be above 0
RULE = (
    f"'{FINDS}': above every control, each difference with p < {SIGNIFICANT} after Holm's correction over all methods. "
    f"'{SPARES}': below every control likewise. '{PLACED}': above its own shuffled blame, not above all others. "
    f"'{UNSCORED}' of the errors, '{FEW}': nothing is said. '{NOTHING}' is no proof of nothing. In brackets: equal place. "
    "± is half of a 95 % interval by problem. References know the place, the kind or the error, and are not in Holm's."
)
PLACE = "place alone"
REFERENCES: dict[str, Callable[[Label, np.ndarray], np.ndarray]] = {
    PLACE: lambda label, wrong_T: np.arange(len(wrong_T), 0, -1.0),
    "kind alone": lambda label, wrong_T: (label.kind_T == NUMBER).astype(float),
    "first error": lambda label, wrong_T: wrong_T.astype(float) if label.step is not None else np.ones(len(wrong_T)),
}
NUMBER, WORD, SIGN, BLANK = range(4)


class Results(NamedTuple):
    """What is in a folder."""

    records: dict[str, dict[str, dict[str, Any]]]  # by method and id: problem, no_scores, and places.record()
    texts: dict[str, tuple[str, Any]]  # by id the response and its labels
    counts: Counter[str]
    about: Mapping[str, Any]  # the record of the analysis


def kind_of(piece: str) -> int:
    if any(character.isdigit() for character in piece):
        return NUMBER
    return WORD if any(character.isalpha() for character in piece) else SIGN if piece.strip() else BLANK


class TokenAdvantages(NamedTuple):
    """A method's advantages in a response."""

    advantage_T: np.ndarray
    scored_T: np.ndarray  # bool; the tokens that it scored
    no_scores: str | None


def token_advantages(row: DumpRow) -> dict[str, TokenAdvantages]:
    """Those of each method, by its name."""
    by_method = {}
    for name, of in row.methods.items():
        scored_T = np.ones(len(row), dtype=bool)
        advantage_T = of.advantage_T
        if advantage_T is None:
            advantage_T = of.weight_T * row.base_advantage_T
            scored_T = scored_T if of.score_T is None else np.isfinite(of.score_T)
        by_method[name] = TokenAdvantages(advantage_T.astype(float), scored_T & (of.no_scores is None), of.no_scores)
    return by_method


def label_of(row: DumpRow) -> tuple[Label | None, np.ndarray]:
    """The label of a response, ``None`` where fewer than two steps can be compared, and its first wrong tokens, bool (T,)."""
    places_T, starts = np.arange(len(row)), [start for start, _ in row.labels["steps"]]
    end = row.labels.get("answer", [len(row) - (row.tokens[-1] == "")])[0]  # an end token has no text
    step_T = np.searchsorted(starts[1:], places_T, side="right")
    start, stop = row.labels.get("wrong_step", (0, 0))
    step = int(np.searchsorted(starts[1:], start, side="right")) if "wrong_step" in row.labels else None
    label = among(Label(step_T, np.array([kind_of(piece) for piece in row.tokens]), step), places_T < end)
    return (None if step is not None and start == stop else label), (places_T >= start) & (places_T < stop)


def read(folder: Path) -> Results:
    """The figures of each response in a folder. ValueError: it is none of ``analyze``, or cannot be used."""
    dump, about = read_dump(folder), record_in(folder)
    records: dict[str, dict[str, dict[str, Any]]] = {}
    texts, counts = {}, Counter[str]()
    rows = [row for row in dump if "steps" in row.labels]
    if dump.problems or not rows:
        raise ValueError(f"{folder}: {'; '.join(dump.problems) or 'no response is labelled; give the lines an error'}")
    asked = not is_low(sum("answer" in row.labels for row in rows), len(rows))
    for number, row in enumerate(rows):
        if row.key in texts:
            raise ValueError(f"{folder}: two responses have the id {row.key}; give each its own")
        texts[row.key] = row.response, row.labels
        correct, error = row.outcome == "right", "wrong_step" in row.labels
        try:
            label, wrong_T = label_of(row)
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{folder}: the labels of {row.key} are not those of an analysis ({error})") from error
        if asked and "answer" not in row.labels:
            counts["without an answer"] += 1
        elif row.outcome is None or correct == error:
            counts["correct in spite of an error" if correct else "no outcome or no first error known"] += 1
        elif label is None:
            counts["fewer than two steps to compare"] += 1
        else:
            counts["errors" if error else "controls"] += 1
            if (row.base_advantage_T != -1).any():
                raise ValueError(f"{folder}: {row.key} has not the advantage -1; analyze with --advantages wrong")
            one_T, compared_T = np.ones(len(row), dtype=bool), label.step_T >= 0
            blames = {name: (of(label, wrong_T), one_T, None) for name, of in REFERENCES.items()}
            for name, of in token_advantages(row).items():
                blames[name] = -of.advantage_T, of.scored_T, of.no_scores
            for name, (blame_T, scored_T, no_scores) in blames.items():
                kept = record(blame_T, scored_T & compared_T, label, np.random.default_rng([number, 5]))
                known = {"id": row.key, "problem": row.group, "no_scores": no_scores}
                records.setdefault(name, {})[row.key] = known | kept
    if not counts["errors"]:
        raise ValueError(f"{folder}: no incorrect solution has a first error and an answer; {dict(counts)}")
    complete = {name: of for name, of in records.items() if len(of) == len(records[PLACE])}
    return Results(complete, texts, counts, about)


def figures_of(
    responses: Sequence[Mapping[str, Any]],
    of_place: Mapping[str, Mapping[str, Any]],
    *,
    other_problems: bool = False,
) -> dict[str, Estimate]:
    """The figures of the first errors with their controls; ``of_place``: the same responses' blame by place alone;
    ``other_problems``: whether those of an error's own problem are no controls of it.

    Controls of an incorrect response are the correct ones nearest to it in number of steps, at least ``FEWEST``: in a much
    longer one its place is between two steps, and a method that aims at a place would gain.
    """
    errors = [one for one in responses if one["first"] is not None]
    controls = [one for one in responses if one["first"] is None]
    problems = [one["problem"] for one in errors]
    figures = {"scored": mean_of([one["no_scores"] is None for one in errors])}
    figures["not finite"] = mean_of([one["no_scores"] == "non-finite scores" for one in errors])
    places_W = np.array([one["first"] / max(1, one["steps"] - 1) for one in errors])
    apart_WC = np.array([[abs(one["steps"] - other["steps"]) for other in controls] for one in errors], dtype=float)
    if other_problems:
        apart_WC[np.array([[one["problem"] == other["problem"] for other in controls] for one in errors])] = np.inf
    if controls:
        nearest_W1 = np.sort(apart_WC, axis=1)[:, [min(FEWEST, len(controls)) - 1]]
        apart_WC = (apart_WC > nearest_W1) | np.isinf(apart_WC)
    for name in FIGURES:
        own_W = np.fromiter((one["figures"][name] for one in errors), float)
        others = {"gain": np.fromiter((one["shuffled"][name] for one in errors), float)}
        figures[name] = mean_of(own_W, problems)
        if name == "step":
            others["earlier"] = np.fromiter((of_place[one["id"]]["figures"][name] for one in errors), float)
            others["later"] = 1 - others["earlier"]
            others["kinds"] = np.fromiter((one["kinds"] for one in errors), float)
        for other, others_W in others.items():
            figures[f"{name}_{other}"] = mean_of(np.round(own_W - others_W, 9), problems)  # rounding is no difference
        if controls:
            at_WC = np.stack([_at(places_W, one["figures"][name]) for one in controls], axis=1)
            at_WC[apart_WC] = math.nan
            known_W = np.isfinite(own_W) & np.isfinite(at_WC).any(axis=1)
            if known_W.any():
                of_controls = [one["problem"] for one in controls]
                compared = own_W[known_W], at_WC[known_W], np.array(problems)[known_W], of_controls
                figures[f"{name}_control"], figures[f"{name}_above"] = above_controls(*compared)
    return figures


def _at(places_W: np.ndarray, values_M: np.ndarray) -> np.ndarray:
    """A response's figures at relative places, 0 its first step and 1 its last, those between two steps in proportion."""
    at_W = places_W * (len(values_M) - 1)
    low_W = np.floor(at_W).astype(int)
    high_W, share_W = np.ceil(at_W).astype(int), at_W - low_W
    return np.where(share_W == 0, values_M[low_W], (1 - share_W) * values_M[low_W] + share_W * values_M[high_W])


def verdicts(figures: Mapping[str, Mapping[str, Estimate]]) -> dict[str, str]:
    """The verdict on each method, by :data:`RULE`."""
    words, compared = {}, []
    for method, own in figures.items():
        differences = [own.get(f"step_{one}", Estimate(0.0, count=0)) for one in CONTROLS]
        p = float(np.nan_to_num([one.p for one in differences], nan=1.0).max())
        signs = {math.copysign(1, one.value) for one in differences}
        alike = own["step"].value == 0.5 and own["step"].error == 0 and own["not finite"].value == 0
        if own["step"].count < FEWEST:
            words[method] = FEW
        elif alike or own["scored"].value < LEAST_SCORED:
            words[method] = ALIKE if alike else UNSCORED
        else:
            placed = differences[0].value > 0 and differences[0].p < SIGNIFICANT
            words[method] = PLACED if placed else NOTHING
            word = FINDS if signs == {1} else SPARES if signs == {-1} else words[method]
            compared.append((method, word, p if len(signs) == 1 else 1.0))
    known = [one for one in compared if one[0] in REFERENCES]
    others = [one for one in compared if one[0] not in REFERENCES]
    corrected = [one[2] for one in known] + holm([one[2] for one in others])
    for (method, word, _), p in zip([*known, *others], corrected, strict=True):
        words[method] = word if p < SIGNIFICANT else words[method]
    return words


def figures_in(results: Results) -> dict[str, dict[str, Estimate]]:
    """The figures of each method, the references first."""
    records = results.records
    return {name: figures_of(list(of.values()), records[PLACE]) for name, of in records.items()}


def report(results: Results) -> str:
    """The table as Markdown."""
    figures = figures_in(results)
    words, rows = verdicts(figures), []
    for method, own in figures.items():
        cells = [method, words[method], str(results.counts["errors"]), f"{100 * own['scored'].value:.0f}"]
        cells += [cell(own["step"])] + [cell(own.get(f"step_{one}"), signed=True) for one in CONTROLS]
        rows.append(
            cells + [cell(own[one], own.get(f"{one}_control"), 100 if one == "hit" else 1) for one in FIGURES[1:]]
        )
    head = ["method", "verdict", "errors", "scored, %", "AUROC, first wrong step"]
    head += [f"above {name}" for name in CONTROLS.values()]
    head += ["most blamed step is the first wrong one, %", "steps after it against before"]
    counts = "; ".join(f"{count} {name}" for name, count in results.counts.items())
    lost = [name for name in results.about.get("methods", {}) if name not in figures]
    notes = [f"Not measured: {name} ({results.about['failed'].get(name, 'not in every file')})." for name in lost]
    read_by = f"Read by {results.about.get('model', 'an unknown model')}. {counts}."
    return "\n".join([" ".join([read_by, *notes]), "", *table(head, rows, right=2), "", RULE])


def cell(own: Estimate | None, control: Estimate | None = None, scale: int = 1, signed: bool = False) -> str:
    if own is None or math.isnan(own.value):
        return ""
    digits = 0 if scale > 1 else 2
    text = f"{scale * own.value:{'+' if signed else ''}.{digits}f}"
    text += "" if math.isnan(own.half) else f" ± {scale * own.half:.{digits}f}"
    return text + ("" if control is None else f" ({scale * control.value:.{digits}f})")


def compare(first: Path, second: Path) -> str:
    """Methods of two folders on the same responses, paired, as Markdown. A method is compared with itself, by name; where each
    folder has one of its own and they share none, these two. ValueError: nothing can be compared."""
    both = read(first), read(second)
    if both[0].texts != both[1].texts:
        raise ValueError(f"{first} and {second} have other responses, tokens or labels; analyze the same file")
    own = [[method for method in one.records if method not in REFERENCES] for one in both]
    pairs = [(method, method) for method in own[0] if method in own[1]]
    if not pairs and len(own[0]) == len(own[1]) == 1:
        pairs = [(own[0][0], own[1][0])]
    if not pairs:
        raise ValueError(f"{first} and {second} share no method")
    rows, gains = [], []
    for pair in pairs:
        kept = [
            {
                key: (of["problem"], of["figures"]["step"])
                for key, of in one.records[name].items()
                if of["first"] is not None
            }
            for one, name in zip(both, pair, strict=True)
        ]
        values = pd.DataFrame(
            [(*kept[0][key], kept[1][key][1]) for key in kept[0]], columns=["problem", "first", "second"]
        )
        gains.append(mean_of(values["second"] - values["first"], values["problem"]))
        means = values[["first", "second"]].mean()
        rows.append([" - ".join(dict.fromkeys(pair[::-1])), str(len(values)), *(f"{mean:.3f}" for mean in means)])
    for row, gain, p in zip(rows, gains, holm([gain.p for gain in gains]), strict=True):
        row += [f"{gain.value:+.3f} ± {gain.half:.3f}", f"{p:.3f}"]
    return "\n".join(table(["method", "errors", "first", "second", "second - first", "p, Holm"], rows, right=1))
