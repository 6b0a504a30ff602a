"""What a run leaves: ``results.json`` with the raw values of each response, the figures that follow from them, and verdicts.

``results.json`` has ``format``, ``version``, ``date``, ``versions``, ``quick`` and ``tasks``. A task has its ``settings``,
``model``, the ``data``'s digest, ``counts``, and by method ``note`` (why there is nothing) and ``parts``: models of a task,
batches of a file. A part has its number, ``figures`` (value, standard error, count) and ``responses``: ``id``, ``problem``,
``first`` (the first wrong step from 0; null: a control), ``steps`` (mean blame, ``-A_t``), ``figures``, ``shuffled``,
``kinds`` and ``scored`` (null: the method asked for no scores). Of a control ``figures`` has a value for every step.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.methods import BASELINE, REFERENCES
from bench.places import BY_STEP, FIGURES
from bench.statistics import Estimate, above_controls, holm, mean_of, pooled
from recipe.marked_text import table

FORMAT, VERSION = "grail_advantage.bench", 1
PLACE = "place alone"
FEWEST = 10
"""Problems below which nothing is said of a method, and controls of a response."""
LEAST_SCORED = 0.5
SIGNIFICANT = 0.05
FINDS, SPARES, PLACED, NOTHING = "finds errors", "blames errors least", "not told from place or kind", "not shown"
ALIKE, FEW, UNSCORED = "treats a response's tokens alike", f"fewer than {FEWEST} problems", "scores less than half"
RULE = (
    f"'{FINDS}': above every control, each difference with p < {SIGNIFICANT} after Holm's correction over all methods and "
    f"tasks of this page. '{SPARES}': below every control likewise. '{PLACED}': above its own shuffled blame, not above all "
    f"others. '{UNSCORED}' of the errors, '{FEW}': nothing is said. '{NOTHING}' is no proof of nothing. References are not "
    "in Holm's."
)
Result = dict[str, Any]
Figures = dict[str, Estimate]


def write_json(value: Any) -> str:
    """JSON without NaN, numbers with nine digits."""
    text = json.dumps(value, default=float)
    rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"), parse_constant=lambda _: None)
    return json.dumps(rounded, ensure_ascii=False) + "\n"


def read_results(path: Path) -> Result:
    """A results.json; ValueError where it is none of this version."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        known = result["format"] == FORMAT and result["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as a results.json of the bench ({error})") from error
    if not known:
        raise ValueError(f"{path}: is of version {result['version']}, this bench reads {VERSION}; run the bench again")
    return result


def responses_of(task: Result, method: str) -> dict[int, list[Result]]:
    """A method's responses by independent model; batches of a file are of one."""
    found: dict[int, list[Result]] = defaultdict(list)
    for part in task["methods"][method]["parts"]:
        found[0 if task["labelled"] else part["part"]] += part["responses"]
    return found


def figures_of(task: Result) -> dict[str, Figures]:
    """The figures of each method that has any."""
    figures: dict[str, Figures] = {}
    for method, of in task["methods"].items():
        if not of["parts"]:
            continue
        of_place = responses_of(task, PLACE)
        by_model = [places(responses, of_place[model]) for model, responses in responses_of(task, method).items()]
        own = {name: pooled([one[name] for one in by_model if name in one]) for name in by_model[0]}
        for name in of["parts"][0]["figures"]:
            estimates = [Estimate(*_numbers(part["figures"][name])) for part in of["parts"]]
            own[name] = Estimate(sum(one.value for one in estimates)) if "seconds" in name else pooled(estimates)
        figures[method] = own
    return figures


def _numbers(values: Iterable[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def places(responses: Sequence[Result], of_place: Sequence[Result]) -> Figures:
    """The figures of the first errors with their controls; ``of_place``: the same responses' blame by place alone.

    Controls of an incorrect response are the correct ones nearest to it in number of steps, at least ``FEWEST``: in a much
    longer one its place lies between two steps, and a method that aims at a place would gain.
    """
    errors = [one for one in responses if one["first"] is not None]
    controls = [one for one in responses if one["first"] is None]
    if not errors:
        return {}
    earlier = {one["id"]: one["figures"] for one in of_place}
    problems = [one["problem"] for one in errors]
    figures: Figures = {"scored": mean_of([one["scored"] is True for one in errors])}
    figures["not finite"] = mean_of([one["scored"] is False for one in errors])
    places_W = np.array([one["first"] / max(1, len(one["steps"]) - 1) for one in errors])
    apart_WC = np.array([[abs(len(one["steps"]) - len(other["steps"])) for other in controls] for one in errors])
    if controls:
        apart_WC = apart_WC > np.sort(apart_WC, axis=1)[:, [min(FEWEST, len(controls)) - 1]]
    for name in FIGURES:
        own_W = _numbers(one["figures"].get(name) for one in errors)
        if np.isnan(own_W).all():
            continue
        others = {"gain": _numbers(one["shuffled"][name] for one in errors)}
        figures[name], figures[f"{name}_shuffled"] = mean_of(own_W, problems), mean_of(others["gain"], problems)
        if "hit" not in name:
            others["earlier"] = _numbers(earlier[one["id"]].get(name) for one in errors)
            others["later"] = 1 - others["earlier"]
        if name == "step":
            others["kinds"] = _numbers(one["kinds"] for one in errors)
        for other, others_W in others.items():
            figures[f"{name}_{other}"] = mean_of(np.round(own_W - others_W, 9), problems)  # rounding is no difference
        if controls and name in BY_STEP:
            at_WC = np.stack([_at(places_W, _numbers(one["figures"][name])) for one in controls], axis=1)
            at_WC[apart_WC] = math.nan
            known_W = np.isfinite(own_W) & np.isfinite(at_WC).any(axis=1)
            figures[f"{name}_control"], figures[f"{name}_above"] = above_controls(
                own_W[known_W], at_WC[known_W], np.array(problems)[known_W], [one["problem"] for one in controls]
            )
    return figures


def _at(places_W: np.ndarray, values_M: np.ndarray) -> np.ndarray:
    """A response's figures at relative places, 0 its first step and 1 its last, those between two steps in proportion."""
    at_W = places_W * (len(values_M) - 1)
    low_W = np.floor(at_W).astype(int)
    high_W, share_W = np.ceil(at_W).astype(int), at_W - low_W
    return np.where(share_W == 0, values_M[low_W], (1 - share_W) * values_M[low_W] + share_W * values_M[high_W])


def deciding(task: Result) -> tuple[str, list[str]]:
    """The figure that decides on a task, and the differences that must all be above 0."""
    if task["labelled"]:
        return "step", ["step_gain", "step_earlier", "step_later", "step_kinds", "step_above"]
    return "first", ["first_gain", "first_earlier", "first_later"]


def verdicts(tasks: Sequence[tuple[Result, Mapping[str, Figures]]]) -> list[dict[str, str]]:
    """Of each task the verdict on each method, by :data:`RULE`."""
    found: list[dict[str, str]] = [{} for _ in tasks]
    compared = []
    for words, (task, figures) in zip(found, tasks, strict=True):
        name, comparisons = deciding(task)
        for method, own in figures.items():
            if name not in own:
                continue
            differences = [own.get(one, Estimate(0.0, count=0)) for one in comparisons]
            p = float(np.nan_to_num([one.p for one in differences], nan=1.0).max())
            signs = {math.copysign(1, one.value) for one in differences}
            alike = own[name].value == 0.5 and own[name].error == 0 and own["not finite"].value == 0
            one_model = task["labelled"] or len(task["methods"][method]["parts"]) == 1
            if own[name].count < FEWEST and one_model:
                words[method] = FEW
            elif alike or own["scored"].value < LEAST_SCORED:
                words[method] = ALIKE if alike else UNSCORED
            else:
                placed = differences[0].value > 0 and differences[0].p < SIGNIFICANT
                words[method] = PLACED if placed else NOTHING
                word = FINDS if signs == {1} else SPARES if signs == {-1} else words[method]
                compared.append((words, method, word, p if len(signs) == 1 else 1.0))
    known = [one for one in compared if one[1] in REFERENCES]
    others = [one for one in compared if one[1] not in REFERENCES]
    corrected = [one[3] for one in known] + holm([one[3] for one in others])
    for (words, method, word, _), p in zip([*known, *others], corrected, strict=True):
        words[method] = word if p < SIGNIFICANT else words[method]
    return found


def _of_errors(task: Result, method: str, figure: str) -> pd.DataFrame:
    """A method's figure of each error and its problem, by model and response."""
    responses = [
        (model, one) for model, of in responses_of(task, method).items() for one in of if one["first"] is not None
    ]
    rows = [(model, one["id"], one["problem"], one["figures"][figure]) for model, one in responses]
    columns = ["model", "id", "problem", "value"]
    return pd.DataFrame(rows, columns=columns).astype({"value": float}).set_index(["model", "id"])


def compare(first: Path, second: Path) -> str:
    """Methods of two results on the same responses, as Markdown; ValueError where there are none. A method is compared with
    itself, by name; where each has one of its own and they share none, these two."""
    results = read_results(first), read_results(second)
    tasks = [{task["name"]: task for task in result["tasks"]} for result in results]
    rows, gains, notes = [], [], []
    for name in [name for name in tasks[0] if name in tasks[1]]:
        both = tasks[0][name], tasks[1][name]
        if both[0]["data"] != both[1]["data"]:
            notes.append(f"{name}: left out, the data differ ({both[0]['data']}, {both[1]['data']}).")
            continue
        figure, _ = deciding(both[0])
        own = [
            [method for method, of in task["methods"].items() if of["parts"] and method not in (*REFERENCES, BASELINE)]
            for task in both
        ]
        pairs = [(method, method) for method in own[0] if method in own[1]]
        if not pairs and len(own[0]) == len(own[1]) == 1:
            pairs = [(own[0][0], own[1][0])]
        notes.append(f"{name}: {figure}, read by {both[0]['model']['name']} and {both[1]['model']['name']}.")
        for pair in pairs:
            one, two = (_of_errors(task, method, figure) for task, method in zip(both, pair, strict=True))
            shared = one.merge(two, left_index=True, right_index=True, suffixes=("", " 2"))
            models = [mean_of(of["value 2"] - of["value"], of["problem"]) for _, of in shared.groupby(level="model")]
            if models:
                gains.append(pooled(models))
                means = [f"{shared[column].mean():.3f}" for column in ("value", "value 2")]
                rows.append([name, " - ".join(dict.fromkeys(pair[::-1])), len(shared), *means])
    if not rows:
        raise ValueError(f"{first} and {second} share no task, data and method. {' '.join(notes)}")
    for row, gain, p in zip(rows, gains, holm([gain.p for gain in gains]), strict=True):
        row += [f"{gain.value:+.3f} ± {gain.half:.3f}", f"{p:.3f}"]
    head = ["task", "method", "errors", "first", "second", "second - first", "p, Holm"]
    return "\n".join([*notes, "", *table(head, rows, right=2)])
