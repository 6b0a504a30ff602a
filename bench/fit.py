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

from bench.credit import Case, Sums, cosine, read, uniform_of
from bench.statistics import jackknife
from bench.table import FEWEST, cell
from grail_advantage.dump import write_whole
from grail_advantage.methods.fitted import FEATURES, Fit, features
from grail_advantage.text_io import table

PARTS = 5
RIDGE = 1.0  # on coefficients of features with a deviation of 1
PLACE = [FEATURES.index(name) for name in ("constant", "place", "is the answer")]


def features_of(case: Case) -> np.ndarray:
    """(J, F)."""
    surprisal_T = np.nan_to_num(-case.row.old_log_prob_T.astype(float)).clip(min=0)
    entropy_T = np.nan_to_num(case.row.entropy_T.astype(float)).clip(min=0)
    return features(surprisal_T, entropy_T, case.starts, case.is_answered)


def ridge(cases: Sequence[Case], columns: Sequence[int]) -> np.ndarray:
    """Coefficients (F,) of these features, 0 of the others; every token counts once."""
    coefficients = np.zeros(len(FEATURES))
    inputs = [abs(case.advantage) * features_of(case)[case.step_T][:, columns] for case in cases]
    input_NF = np.concatenate(inputs)
    credit_N = np.concatenate([case.credit_J[case.step_T] for case in cases])
    deviation_F = input_NF.std(axis=0) + 1e-9
    scaled_NF = input_NF / deviation_F
    square_FF = scaled_NF.T @ scaled_NF + RIDGE * np.eye(len(columns))
    coefficients[list(columns)] = np.linalg.solve(square_FF, scaled_NF.T @ credit_N) / deviation_F
    return coefficients


def predicted(cases: Sequence[Case], columns: Sequence[int]) -> list[np.ndarray]:
    """Token advantages (T,) by fits to the other parts' problems."""
    part_of = Sums(cases).index % PARTS
    signs = np.sign([case.advantage for case in cases])
    advantages: list[np.ndarray] = [np.zeros(0)] * len(cases)
    for sign in (-1, 1):
        for part in range(PARTS):
            rest = [case for place, case in enumerate(cases) if signs[place] == sign and part_of[place] != part]
            coefficients = ridge(rest, columns)
            for place in np.flatnonzero((signs == sign) & (part_of == part)):
                case = cases[place]
                advantages[place] = abs(case.advantage) * (features_of(case) @ coefficients)[case.step_T]
    return advantages


def fit(cases: Sequence[Case], origin: str) -> tuple[Fit, str]:
    """The fit, and the report on it. ValueError: it does not follow the credit of other problems."""
    by_sign = {sign: [case for case in cases if case.advantage * sign > 0] for sign in (-1, 1)}
    few = min(len(Sums(of_sign).problems) if of_sign else 0 for of_sign in by_sign.values())
    if few < FEWEST:
        raise ValueError(
            f"{origin}: {few} problems have correct or incorrect responses with values; give {FEWEST} or more"
        )
    everything = range(len(FEATURES))
    by_fit = cosine(cases, predicted(cases, everything))
    others = {"uniform": cosine(cases, uniform_of(cases)), "place alone": cosine(cases, predicted(cases, PLACE))}
    parts = [f"cosine with the credit of other problems: fitted {cell(jackknife(by_fit))}"]
    follows = True
    for name, of_other in others.items():
        gain = jackknife(by_fit - of_other)
        follows = follows and gain.value > gain.half  # also false for NaN, without credit above its noise
        parts.append(f"{name} {cell(jackknife(of_other))} ({cell(gain, signed=True)})")
    said = "; ".join(parts)
    if not follows:
        raise ValueError(
            f"{origin}: {said}. It is not shown to be above both, so nothing is written; give more problems"
        )
    coefficients = {sign: ridge(of_sign, everything) for sign, of_sign in by_sign.items()}
    features_NF = np.concatenate([features_of(case) for case in cases])
    settings = cases[0].row.labels["values"]["settings"]
    result = Fit(
        features=FEATURES,
        separator=settings["separator"],
        incorrect=coefficients[-1].tolist(),
        correct=coefficients[1].tolist(),
        lowest=features_NF.min(axis=0).tolist(),
        highest=features_NF.max(axis=0).tolist(),
        origin={"folder": origin, "responses": len(cases), "cosine": said, "values": settings},
    )
    rows = [[name, *(f"{coefficients[sign][place]:+.2f}" for sign in (-1, 1))] for place, name in enumerate(FEATURES)]
    return result, "\n".join([said, "", *table(["feature", "A < 0", "A > 0"], rows, right=1)])


def main(arguments: Sequence[str]) -> str:
    """``python -m bench fit FOLDER OUT``; ValueError where nothing is written."""
    if len(arguments) != 2:
        raise ValueError("fit takes a folder of analyze and the file to write: python -m bench fit FOLDER OUT")
    folder, out = map(Path, arguments)
    result, text = fit(read(folder)[0], str(folder))
    write_whole(out, result.model_dump_json(indent=1))
    return text
