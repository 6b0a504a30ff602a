"""Fits the method ``fitted``: the credit of a step by rollouts as a linear function of its surprisal, entropy and place.

``python -m bench fit FOLDER OUT`` reads a folder of ``analyze`` over lines with ``values``, and writes OUT for
``algorithm.fitted.file``. It is a ridge for each sign of the advantage. OUT is not written unless the cosine with the credit
of problems that were left out (five parts) is above uniform's and above that of place alone, each difference with its 95 %
interval by problem.

Shape suffixes: N tokens, T tokens of a response, F features, J steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.credit import BASE, Case, cosine, read
from bench.statistics import jackknife
from bench.table import FEWEST, cell
from grail_advantage.dump import write_whole
from grail_advantage.methods.fitted import FEATURES, Fit, features
from grail_advantage.text_io import say, table

PARTS = 5
RIDGE = 1.0  # on coefficients of features with a deviation of 1
EVERYTHING = list(range(len(FEATURES)))
PLACE = [FEATURES.index(name) for name in ("constant", "place", "is the answer")]


def features_of(case: Case) -> np.ndarray:
    """(J, F)."""
    surprisal_T = np.nan_to_num(-case.row.old_log_prob_T.astype(float)).clip(min=0)
    entropy_T = np.nan_to_num(case.row.entropy_T.astype(float)).clip(min=0)
    starts = case.row.labels["values"]["starts"]
    return features(surprisal_T, entropy_T, starts, len(starts) > case.steps)


def ridge(cases: Sequence[Case], columns: list[int]) -> np.ndarray:
    """Coefficients (F,) of these features, 0 of the others; every token counts once."""
    input_NF = np.concatenate(
        [abs(case.advantage) * features_of(case)[case.credit_step_T][:, columns] for case in cases]
    )
    credit_N = np.concatenate([case.credit_J[case.credit_step_T] for case in cases])
    # Where all advantages have one size, the constant has the deviation 0.
    deviation_F = input_NF.std(axis=0) + 1e-9
    scaled_NF = input_NF / deviation_F
    square_FF = scaled_NF.T @ scaled_NF + RIDGE * np.eye(len(columns))
    coefficients = np.zeros(len(FEATURES))
    coefficients[columns] = np.linalg.solve(square_FF, scaled_NF.T @ credit_N) / deviation_F
    return coefficients


def predicted(cases: Sequence[Case], columns: list[int]) -> np.ndarray:
    """The cosine of fits to the other parts' problems."""
    # By problem: a fit that has seen other responses to one would know its values.
    parts = np.unique([case.problem for case in cases], return_inverse=True)[1] % PARTS
    signs = [case.advantage > 0 for case in cases]
    keys = list(zip(signs, parts.tolist(), strict=True))
    fits = {}
    for sign, part in set(keys):
        rest = [
            case for case, key in zip(cases, keys, strict=True) if key[0] == sign and key[1] != part
        ]
        fits[sign, part] = ridge(rest, columns)
    fitted = []
    for case, key in zip(cases, keys, strict=True):
        credit_J = abs(case.advantage) * features_of(case) @ fits[key]
        fitted.append(case.by("fitted", credit_J[case.credit_step_T]))
    return cosine(fitted, "fitted")


def fit(cases: Sequence[Case], origin: str) -> tuple[Fit, str]:
    """The fit, and the report on it. ValueError: it does not follow the credit of other problems."""
    incorrect = [case for case in cases if case.advantage < 0]
    correct = [case for case in cases if case.advantage > 0]
    # Each sign of the advantage has a fit of its own.
    problems = min(len({case.problem for case in part}) for part in (incorrect, correct))
    if problems < FEWEST:
        raise ValueError(
            f"{origin}: {problems} problems have correct or incorrect responses with values; give {FEWEST} or more"
        )
    by_fit = predicted(cases, EVERYTHING)
    by_uniform = cosine(cases, BASE)
    by_place = predicted(cases, PLACE)
    gains = [jackknife(by_fit - by_other) for by_other in (by_uniform, by_place)]
    figures = [cell(jackknife(of_one)) for of_one in (by_fit, by_uniform, by_place)]
    summary = (
        "cosine with the credit of other problems: fitted {}, uniform {}, place alone {}".format(
            *figures
        )
    )
    if not all(gain.value > gain.half for gain in gains):  # NaN where credit is not above its noise
        raise ValueError(
            f"{origin}: {summary}; not shown to be above both, so nothing is written; give more problems"
        )
    features_NF = np.concatenate([features_of(case) for case in cases])
    settings = cases[0].row.labels["values"]["settings"]
    result = Fit(
        features=FEATURES,
        separator=settings["separator"],
        incorrect=ridge(incorrect, EVERYTHING).tolist(),
        correct=ridge(correct, EVERYTHING).tolist(),
        lowest=features_NF.min(axis=0).tolist(),
        highest=features_NF.max(axis=0).tolist(),
        origin={"folder": origin, "responses": len(cases), "cosine": summary, "values": settings},
    )
    triples = zip(FEATURES, result.incorrect, result.correct, strict=True)
    rows = [[name, f"{below:+.2f}", f"{above:+.2f}"] for name, below, above in triples]
    return result, "\n".join([summary, "", *table(["feature", "A < 0", "A > 0"], rows, right=1)])


def main(arguments: Sequence[str]) -> None:
    """``python -m bench fit FOLDER OUT``; ValueError where nothing is written."""
    if len(arguments) != 2:
        raise ValueError(
            "fit takes a folder of analyze and the file to write: python -m bench fit FOLDER OUT"
        )
    folder, out = map(Path, arguments)
    result, text = fit(read(folder)[0], str(folder))
    write_whole(out, result.model_dump_json(indent=1))
    say(*text.splitlines())
