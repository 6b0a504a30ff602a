"""The table by labels: reads a folder of ``analyze``, and gives each method its figures beside their controls, and a verdict.

An incorrect solution with a first error is an error, a correct one without is a control; others are counted. All have the
advantage -1, as if an incorrect answer had been sampled: where does the method put the blame?

Shape suffixes: T response tokens, M steps, W errors, C controls.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench.places import Label, Record, TokenAdvantages, record_of, rows_of, token_advantages
from bench.statistics import Estimate, above_controls, holm, mean_of
from grail_advantage.analyze.command import record_in
from grail_advantage.answers.missing import is_low
from grail_advantage.dump import DumpRow
from grail_advantage.text_io import table

# Problems below which nothing is said of a method, and controls of a response
FEWEST = 10
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
KIND = "kind alone"
FIRST_ERROR = "first error"
USED = ("errors", "controls")


Figures = Mapping[str, Estimate]
"""A method's figures, by name."""


def kind_of(piece: str) -> str:
    if any(map(str.isdigit, piece)):
        return "number"
    if any(map(str.isalpha, piece)):
        return "word"
    return "sign" if piece.strip() else "blank"


def label_of(row: DumpRow) -> Label | None:
    """The label of a response, ``None`` where fewer than two steps can be compared, or not the one to blame."""
    starts = [start for start, _ in row.labels["steps"]]
    # An end token has no text, and is compared with nothing.
    end = len(row) - (row.tokens[-1] == "")
    if "answer" in row.labels:
        end = row.labels["answer"][0]
    # Steps that start at 0, 4 and 4: token 4 is of the third, and the second, without a token, is no step.
    number_T = np.searchsorted(starts[1:], np.arange(len(row)), side="right")
    numbers, step_K = np.unique(number_T[:end], return_inverse=True)
    if len(numbers) < 2:
        return None
    step_T = np.full(len(row), -1)
    step_T[:end] = step_K
    kind_T = np.array([kind_of(piece) for piece in row.tokens])
    if "wrong_step" not in row.labels:
        return Label(step_T, kind_T)
    start, stop = row.labels["wrong_step"]
    # A wrong step without a token cannot be blamed.
    if start == stop or number_T[start] not in numbers:
        return None
    return Label(step_T, kind_T, int(np.searchsorted(numbers, number_T[start])))


def sort_of(is_correct: bool | None, has_error: bool, has_answer: bool) -> str:
    """Whether the table can use a solution, as one of :data:`USED`, or why not."""
    if not has_answer:
        return "without an answer"
    if is_correct and has_error:
        return "correct in spite of an error"
    if is_correct is None or is_correct == has_error:
        return "no outcome or no first error known"
    return "errors" if has_error else "controls"


def read(folder: Path) -> tuple[dict[str, list[Record]], Counter[str]]:
    """The figures of each response by method, and how many responses there are of each sort. ValueError: the folder is
    none of ``analyze``, or cannot be used."""
    rows = [row for row in rows_of(folder) if "steps" in row.labels]
    if not rows:
        raise ValueError(f"{folder}: no response is labelled; give the lines an error")
    # Where hardly any response has an answer, the lines are of a task without one.
    needs_answer = not is_low(sum("answer" in row.labels for row in rows), len(rows))
    records = defaultdict(list)
    counts = Counter()
    for number, row in enumerate(rows):
        try:
            label = label_of(row)
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(
                f"{folder}: the labels of {row.key} are not those of an analysis ({error})"
            ) from error
        is_correct = {"right": True, "wrong": False}.get(row.outcome)
        has_answer = "answer" in row.labels or not needs_answer
        sort = sort_of(is_correct, "wrong_step" in row.labels, has_answer)
        if label is None and sort in USED:
            sort = "fewer than two steps to compare"
        counts[sort] += 1
        if sort not in USED:
            continue
        if (row.base_advantage_T != -1).any():
            raise ValueError(
                f"{folder}: {row.key} has not the advantage -1; analyze with --advantages wrong"
            )
        is_error_T = (label.step_T == label.step) | (label.step is None)
        by_method = {
            PLACE: TokenAdvantages(np.arange(-len(row), 0.0)),
            KIND: TokenAdvantages(-1.0 * (label.kind_T == "number")),
            FIRST_ERROR: TokenAdvantages(-1.0 * is_error_T),
            **token_advantages(row),
        }
        for name, advantages in by_method.items():
            records[name].append(record_of(row, advantages, label, number))
    if not counts["errors"]:
        raise ValueError(
            f"{folder}: no incorrect solution has a first error and an answer; {dict(counts)}"
        )
    # Where responses are missing, a method's figures are of other problems than the references'.
    responses = len(records[PLACE])
    complete = {name: entries for name, entries in records.items() if len(entries) == responses}
    return complete, counts


def figures_of(records: Sequence[Record], *, others_are_controls: bool = False) -> Figures:
    """AUROC of the steps to blame, and by how much it is above each control. Records without such a step are controls at
    equal place: those nearest in number of steps, at least ``FEWEST``, as in a much longer one the place is between two
    steps, and a method that aims at a place would gain.

    Args:
        records: of a method.
        others_are_controls: whether those of other problems with such a step are controls, too, and none of an error's own
            problem is.
    """
    frame = pd.DataFrame(records).set_index("problem")
    errors = frame[frame["place"].notna()]
    controls = frame if others_are_controls else frame[frame["place"].isna()]
    # Blame that falls from token to token: of five steps the second is above three of the four others, 1 - 1/4.
    by_control = {
        "shuffled": errors["shuffled"],
        "earlier first": 1 - errors["place"],
        "later first": errors["place"],
        "its kinds": errors["kinds"],
    }
    figures = {
        "AUROC": mean_of(errors["auroc"]),
        "scored": Estimate(errors["no_scores"].isna().mean()),
        "failed": Estimate((errors["no_scores"] == "non-finite scores").mean()),
        EQUAL_PLACE: Estimate(math.nan),
    }
    for control, values in by_control.items():
        # Rounding is no difference.
        figures[control] = mean_of((errors["auroc"] - values).round(9))
    if controls.empty:
        return figures
    # The third of five steps is at 0.5, between the second and the third of four.
    at_CW = [
        np.interp(errors["place"], np.linspace(0, 1, len(auroc_M)), auroc_M)
        for auroc_M in controls["auroc_M"]
    ]
    at_WC = pd.DataFrame(at_CW, controls.index, errors.index).T
    steps_W1 = errors[["auroc_M"]].map(len).to_numpy(dtype=float)
    apart_WC = np.abs(steps_W1 - controls["auroc_M"].map(len).to_numpy())
    if others_are_controls:
        apart_WC[errors.index.to_numpy()[:, None] == controls.index.to_numpy()] = math.nan
    # Equal distances share the least of their ranks, and NaN has none.
    is_near_WC = pd.DataFrame(apart_WC).rank(axis=1, method="min") <= FEWEST
    figures[EQUAL_PLACE] = above_controls(errors["auroc"], at_WC.where(is_near_WC.to_numpy()))
    return figures


def verdicts(figures: Mapping[str, Figures]) -> dict[str, str]:
    """The verdict on each method, by :data:`RULE`."""
    words = {}
    p_values = {}
    for method, estimates in figures.items():
        auroc = estimates["AUROC"]
        gains = [estimates[control] for control in CONTROLS]
        if auroc.count < FEWEST:
            words[method] = FEW
        elif auroc.value == 0.5 and auroc.error == estimates["failed"].value == 0:
            words[method] = ALIKE
        elif estimates["scored"].value < LEAST_SCORED:
            words[method] = UNSCORED
        else:
            is_placed = gains[0].value > 0 and gains[0].p < SIGNIFICANT
            words[method] = PLACED if is_placed else NOTHING
            p_values[method] = 1.0
            # Every control must hold, so the weakest counts, and one without a p-value holds nothing.
            if {np.sign(gain.value) for gain in gains} in ({1}, {-1}):
                p_values[method] = np.max([gain.p for gain in gains])
    # References are no hypotheses, and would make the correction stricter.
    p_values.update(
        holm({name: p for name, p in p_values.items() if name not in (PLACE, KIND, FIRST_ERROR)})
    )
    for method, p in p_values.items():
        if p < SIGNIFICANT:
            words[method] = FINDS if figures[method]["shuffled"].value > 0 else SPARES
    return words


def report(folder: Path) -> str:
    """The table as Markdown."""
    records, counts = read(folder)
    about = record_in(folder)
    figures = {name: figures_of(entries) for name, entries in records.items()}
    words = verdicts(figures)
    rows = []
    for method, estimates in figures.items():
        scored = f"{100 * estimates['scored'].value:.0f}"
        rows.append([method, words[method], scored, *cells(estimates, ["AUROC", *CONTROLS])])
    gains = [f"above {control}" for control in CONTROLS]
    head = ["method", "verdict", "scored, %", "AUROC, first wrong step", *gains]
    sorts = "; ".join(f"{count} {sort}" for sort, count in counts.items())
    line = f"Read by {about.get('model', 'an unknown model')}. {sorts}."
    for name in about.get("methods", {}):
        if name not in figures:
            line += f" Not measured: {name} ({about['failed'].get(name, 'not in every file')})."
    return "\n".join([line, "", *table(head, rows, right=2), "", RULE])


def cells(estimates: Figures, columns: Sequence[str]) -> list[str]:
    """A row of a table; differences and correlations have a sign."""
    return [cell(estimates[column], signed="AUROC" not in column) for column in columns]


def cell(estimate: Estimate, signed: bool = False) -> str:
    if math.isnan(estimate.value):
        return ""
    text = f"{estimate.value:{'+' if signed else ''}.2f}"
    return text if math.isnan(estimate.half) else f"{text} ± {estimate.half:.2f}"
