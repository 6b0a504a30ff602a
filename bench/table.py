"""The table by labels: reads a folder of ``analyze``, and gives each method its figures beside their controls, and a verdict.

An incorrect solution with a first error is an error, a correct one without is a control; others are counted. All have the
advantage -1, as if an incorrect answer had been sampled: where does the method put the blame?

Shape suffixes: T response tokens, M steps, W errors, C controls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.places import Label, Record, TokenAdvantages, among, record_of, token_advantages
from bench.statistics import Estimate, above_controls, holm, mean_of
from grail_advantage.analyze.command import record_in
from grail_advantage.answers.missing import is_low
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.text_io import table

FEWEST = 10  # problems below which nothing is said of a method, and controls of a response
LEAST_SCORED = 0.5
SIGNIFICANT = 0.05
FINDS = "finds errors"
SPARES = "blames errors least"
PLACED = "not told from place or kind"
NOTHING = "not shown"
ALIKE = "treats a response's tokens alike"
FEW = f"fewer than {FEWEST} problems"
UNSCORED = "scores less than half"
EQUAL_PLACE = "equal place"
CONTROLS = ("shuffled", "earlier first", "later first", "its kinds", EQUAL_PLACE)
RULE = (
    f"'{FINDS}': above every control, each difference with p < {SIGNIFICANT} after Holm's correction over all methods. "
    f"'{SPARES}': below every control likewise. '{PLACED}': above its own shuffled blame, not above all others. "
    f"'{UNSCORED}' of the errors, '{FEW}': nothing is said. '{NOTHING}' is no proof of nothing. "
    "± is half of a 95 % interval by problem. References know the place, the kind or the error, and are not in Holm's."
)
PLACE = "place alone"
REFERENCES = (PLACE, "kind alone", "first error")
NUMBER, WORD, SIGN, BLANK = range(4)


class Results(NamedTuple):
    """A folder's contents."""

    records: dict[str, dict[str, Record]]  # by method and id
    counts: Counter[str]
    about: Mapping[str, Any]  # the record of the analysis


def kind_of(piece: str) -> int:
    if any(character.isdigit() for character in piece):
        return NUMBER
    if any(character.isalpha() for character in piece):
        return WORD
    return SIGN if piece.strip() else BLANK


def label_of(row: DumpRow) -> tuple[Label | None, np.ndarray]:
    """The label of a response, ``None`` where fewer than two steps can be compared, and its first wrong tokens, bool (T,)."""
    places_T = np.arange(len(row))
    starts = [start for start, _ in row.labels["steps"]]
    # An end token has no text
    end = row.labels.get("answer", [len(row) - (row.tokens[-1] == "")])[0]
    step_T = np.searchsorted(starts[1:], places_T, side="right")
    start, stop = row.labels.get("wrong_step", (0, 0))
    step = None
    if "wrong_step" in row.labels:
        step = int(np.searchsorted(starts[1:], start, side="right"))
    label = among(
        Label(step_T, np.array([kind_of(piece) for piece in row.tokens]), step), places_T < end
    )
    # A wrong step without a token cannot be blamed.
    if step is not None and start == stop:
        label = None
    return label, (places_T >= start) & (places_T < stop)


def sort_of(row: DumpRow, label: Label | None, needs_answer: bool) -> str:
    """Whether the table can use a response, and as what."""
    is_correct = row.outcome == "right"
    has_error = "wrong_step" in row.labels
    if needs_answer and "answer" not in row.labels:
        return "without an answer"
    if is_correct and has_error:
        return "correct in spite of an error"
    if row.outcome is None or is_correct == has_error:
        return "no outcome or no first error known"
    if label is None:
        return "fewer than two steps to compare"
    return "errors" if has_error else "controls"


def read(folder: Path) -> Results:
    """The figures of each response in a folder. ValueError: it is none of ``analyze``, or cannot be used."""
    dump = read_dump(folder)
    rows = [row for row in dump if "steps" in row.labels]
    if dump.problems or not rows:
        raise ValueError(
            f"{folder}: {'; '.join(dump.problems) or 'no response is labelled; give the lines an error'}"
        )
    needs_answer = not is_low(sum("answer" in row.labels for row in rows), len(rows))
    records: dict[str, dict[str, Record]] = {}
    keys = set()
    counts = Counter[str]()
    for number, row in enumerate(rows):
        if row.key in keys:
            raise ValueError(f"{folder}: two responses have the id {row.key}; give each its own")
        keys.add(row.key)
        try:
            label, wrong_T = label_of(row)
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(
                f"{folder}: the labels of {row.key} are not those of an analysis ({error})"
            ) from error
        sort = sort_of(row, label, needs_answer)
        counts[sort] += 1
        if label is None or sort not in ("errors", "controls"):
            continue
        if (row.base_advantage_T != -1).any():
            raise ValueError(
                f"{folder}: {row.key} has not the advantage -1; analyze with --advantages wrong"
            )
        scored_T = np.ones(len(row), dtype=bool)
        blames = (
            np.arange(len(row), 0, -1.0),
            label.kind_T == NUMBER,
            wrong_T | (label.step is None),
        )
        by_method = {
            name: TokenAdvantages(-1.0 * blame_T, scored_T)
            for name, blame_T in zip(REFERENCES, blames, strict=True)
        }
        for name, advantages in {**by_method, **token_advantages(row)}.items():
            records.setdefault(name, {})[row.key] = record_of(
                row.key, row.group, advantages, label, number
            )
    if not counts["errors"]:
        raise ValueError(
            f"{folder}: no incorrect solution has a first error and an answer; {dict(counts)}"
        )
    # Where responses are missing, a method's figures are of other problems than the references'.
    complete = {
        name: of_method
        for name, of_method in records.items()
        if len(of_method) == len(records[PLACE])
    }
    return Results(complete, counts, record_in(folder))


def figures_of(
    records: Sequence[Record], of_place: Mapping[Any, Record], *, other_problems: bool = False
) -> dict[str, Estimate]:
    """AUROC of the steps to blame, and by how much it is above each control. Records without such a step are controls at
    equal place: those nearest in number of steps, at least ``FEWEST``, as in a much longer one the place is between two
    steps, and a method that aims at a place would gain.

    Args:
        records: of a method.
        of_place: by id, the same responses' blame by place alone.
        other_problems: whether those of an error's own problem are no controls of it.
    """
    errors = [record for record in records if record.step is not None]
    controls = [record for record in records if record.step is None]
    problems = [record.problem for record in errors]
    own_W = np.array([record.auroc_M[record.step] for record in errors])
    earlier_W = np.array([of_place[record.id].auroc_M[record.step] for record in errors])
    by_control = {
        "shuffled": np.array([record.shuffled for record in errors]),
        "earlier first": earlier_W,
        "later first": 1 - earlier_W,
        "its kinds": np.array([record.kinds for record in errors]),
    }
    figures = {
        "AUROC": mean_of(own_W, problems),
        "scored": mean_of([record.no_scores is None for record in errors]),
    }
    for control, values_W in by_control.items():
        # Rounding is no difference
        figures[control] = mean_of(np.round(own_W - values_W, 9), problems)
    if controls:
        places_W = np.array([record.step / max(1, len(record.auroc_M) - 1) for record in errors])
        at_WC = np.stack([_at(places_W, record.auroc_M) for record in controls], axis=1)
        steps_W1 = np.array([[len(record.auroc_M)] for record in errors])
        apart_WC = np.abs(steps_W1 - np.array([len(record.auroc_M) for record in controls])).astype(
            float
        )
        if other_problems:
            names_W1 = np.array([[str(problem)] for problem in problems])
            apart_WC[names_W1 == np.array([str(record.problem) for record in controls])] = np.inf
        nearest_W1 = np.sort(apart_WC, axis=1)[:, [min(FEWEST, len(controls)) - 1]]
        at_WC[(apart_WC > nearest_W1) | np.isinf(apart_WC)] = math.nan
        known_W = np.isfinite(own_W) & np.isfinite(at_WC).any(axis=1)
        if known_W.any():
            names = np.array(problems)[known_W]
            figures[EQUAL_PLACE] = above_controls(
                own_W[known_W], at_WC[known_W], names, [record.problem for record in controls]
            )
    return figures


def _at(places_W: np.ndarray, values_M: np.ndarray) -> np.ndarray:
    """A response's figures at relative places, 0 its first step and 1 its last, those between two steps in proportion."""
    return np.interp(places_W * (len(values_M) - 1), np.arange(len(values_M)), values_M)


def verdicts(
    figures: Mapping[str, Mapping[str, Estimate]], failed: Mapping[str, bool]
) -> dict[str, str]:
    """The verdict on each method, by :data:`RULE`; ``failed``: whether any of its scores was not finite."""
    words = {}
    p_values = {}
    for method, estimates in figures.items():
        differences = [estimates.get(control, Estimate(0.0, count=0)) for control in CONTROLS]
        above = all(difference.value > 0 for difference in differences)
        below = all(difference.value < 0 for difference in differences)
        if estimates["AUROC"].count < FEWEST:
            words[method] = FEW
        elif (
            estimates["AUROC"].value == 0.5 and estimates["AUROC"].error == 0 and not failed[method]
        ):
            words[method] = ALIKE
        elif estimates["scored"].value < LEAST_SCORED:
            words[method] = UNSCORED
        else:
            words[method] = NOTHING
            if differences[0].value > 0 and differences[0].p < SIGNIFICANT:
                words[method] = PLACED
            if above or below:
                # Every control must hold, so the weakest counts, and one without a p-value holds nothing.
                p = float(
                    np.nan_to_num([difference.p for difference in differences], nan=1.0).max()
                )
                p_values[method] = FINDS if above else SPARES, p
            else:
                p_values[method] = words[method], 1.0
    # References are no hypotheses, and would make the correction stricter.
    methods = [method for method in p_values if method not in REFERENCES]
    corrected = dict(zip(methods, holm([p_values[method][1] for method in methods]), strict=True))
    for method, (word, p) in p_values.items():
        if corrected.get(method, p) < SIGNIFICANT:
            words[method] = word
    return words


def report(folder: Path) -> str:
    """The table as Markdown."""
    results = read(folder)
    figures, words = summary(results)
    columns = ["AUROC", *CONTROLS]
    rows = []
    for method, estimates in figures.items():
        cells = [cell(estimates.get(column), signed=column != "AUROC") for column in columns]
        rows.append([method, words[method], f"{100 * estimates['scored'].value:.0f}", *cells])
    head = [
        "method",
        "verdict",
        "scored, %",
        "AUROC, first wrong step",
        *(f"above {control}" for control in CONTROLS),
    ]
    counts = "; ".join(f"{count} {name}" for name, count in results.counts.items())
    lost = [name for name in results.about.get("methods", {}) if name not in figures]
    notes = [
        f"Not measured: {name} ({results.about['failed'].get(name, 'not in every file')})."
        for name in lost
    ]
    read_by = f"Read by {results.about.get('model', 'an unknown model')}. {counts}."
    return "\n".join([" ".join([read_by, *notes]), "", *table(head, rows, right=2), "", RULE])


def summary(results: Results) -> tuple[dict[str, dict[str, Estimate]], dict[str, str]]:
    """Figures and verdict of each method, the references first."""
    records = results.records
    figures = {
        name: figures_of(list(entries.values()), records[PLACE])
        for name, entries in records.items()
    }
    failed = {
        name: any(record.no_scores == "non-finite scores" for record in entries.values())
        for name, entries in records.items()
    }
    return figures, verdicts(figures, failed)


def cell(estimate: Estimate | None, signed: bool = False) -> str:
    if estimate is None or math.isnan(estimate.value):
        return ""
    text = f"{estimate.value:{'+' if signed else ''}.2f}"
    return text if math.isnan(estimate.half) else f"{text} ± {estimate.half:.2f}"
