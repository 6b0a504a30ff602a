"""Fits the method ``fitted``: the credit of a step by rollouts as a linear function of its surprisal, entropy and place.

``python -m bench fit FOLDER OUT`` reads a folder of ``analyze`` over lines with ``values``, and writes OUT for
``algorithm.fitted.file``. It is a ridge for each sign of the advantage. OUT is not written unless the cosine with the credit
of problems that were left out (five parts) is above uniform's and above that of place alone, each difference with its 95 %
interval by problem.

Shape suffixes: N tokens, T tokens of a response, F features, J steps.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench.credit import BASE, TRUTH, Case, correlation, read, tokens_of
from bench.statistics import jackknife
from bench.table import FEWEST, cell
from grail_advantage.dump import write_whole
from grail_advantage.methods.fitted import FEATURES, Fit, features
from grail_advantage.text_io import say, table

PARTS = 5
RIDGE = 1.0  # on coefficients of features with a deviation of 1
PLACE = [FEATURES.index(name) for name in ("constant", "place", "is the answer")]


def features_of(case: Case) -> np.ndarray:
    """Of the step of each token, (T, F)."""
    surprisal_T = np.nan_to_num(-case.row.old_log_prob_T.astype(float)).clip(min=0)
    entropy_T = np.nan_to_num(case.row.entropy_T.astype(float)).clip(min=0)
    starts = case.row.labels["values"]["starts"]
    features_JF = features(surprisal_T, entropy_T, starts, len(starts) > case.steps)
    return features_JF[case.label.step_T]


def ridge(tokens: pd.DataFrame, input_NF: np.ndarray, chosen_N: np.ndarray) -> np.ndarray:
    """Coefficients, (F,), by the chosen tokens; each counts once."""
    chosen_NF = input_NF[chosen_N]
    # Where all advantages have one size, the constant has the deviation 0.
    deviation_F = chosen_NF.std(axis=0) + 1e-9
    scaled_NF = chosen_NF / deviation_F
    square_FF = scaled_NF.T @ scaled_NF + RIDGE * np.eye(len(deviation_F))
    return np.linalg.solve(square_FF, scaled_NF.T @ tokens[TRUTH[0]][chosen_N]) / deviation_F


def predicted(
    tokens: pd.DataFrame, input_NF: np.ndarray, signs: Sequence[np.ndarray]
) -> np.ndarray:
    """The cosine of fits to the other parts' problems, one for the tokens of each sign."""
    # By problem: a fit that has seen other responses to one would know its values.
    part_N = pd.factorize(tokens.index.get_level_values("problem"), sort=True)[0] % PARTS
    fitted = pd.Series(0.0, tokens.index)
    for is_sign_N in signs:
        for part in range(PARTS):
            coefficients = ridge(tokens, input_NF, is_sign_N & (part_N != part))
            chosen_N = is_sign_N & (part_N == part)
            fitted[chosen_N] = input_NF[chosen_N] @ coefficients
    return correlation(tokens, fitted)


def fit(cases: Sequence[Case], origin: str) -> tuple[Fit, list[str]]:
    """The fit, and the report on it. ValueError: it does not follow the credit of other problems."""
    tokens = tokens_of(cases)
    # Each sign of the advantage has a fit of its own.
    signs = [(tokens[BASE] * sign > 0).to_numpy() for sign in (-1, 1)]
    problems = min(tokens.index[is_sign_N].unique("problem").size for is_sign_N in signs)
    if problems < FEWEST:
        raise ValueError(
            f"{origin}: {problems} problems have correct or incorrect responses with values; give {FEWEST} or more"
        )
    if any(case.row.entropy_T is None for case in cases):
        raise ValueError(
            f"{origin}: no entropies, which fitted reads; analyze with --method entropy"
        )
    features_NF = np.concatenate([features_of(case) for case in cases])
    input_NF = abs(tokens[[BASE]].to_numpy()) * features_NF
    by_fit = predicted(tokens, input_NF, signs)
    by_uniform = correlation(tokens, tokens[BASE])
    by_place = predicted(tokens, input_NF[:, PLACE], signs)
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
    settings = cases[0].row.labels["values"]["settings"]
    incorrect, correct = (ridge(tokens, input_NF, is_sign_N).tolist() for is_sign_N in signs)
    result = Fit(
        features=FEATURES,
        separator=settings["separator"],
        incorrect=incorrect,
        correct=correct,
        lowest=features_NF.min(axis=0).tolist(),
        highest=features_NF.max(axis=0).tolist(),
        origin={"folder": origin, "responses": len(cases), "cosine": summary, "values": settings},
    )
    triples = zip(FEATURES, incorrect, correct, strict=True)
    rows = [[name, f"{below:+.2f}", f"{above:+.2f}"] for name, below, above in triples]
    return result, [summary, "", *table(["feature", "A < 0", "A > 0"], rows, right=1)]


def main(arguments: Sequence[str]) -> None:
    """``python -m bench fit FOLDER OUT``; ValueError where nothing is written."""
    if len(arguments) != 2:
        raise ValueError(
            "fit takes a folder of analyze and the file to write: python -m bench fit FOLDER OUT"
        )
    folder, out = map(Path, arguments)
    result, lines = fit(read(folder)[0], str(folder))
    write_whole(out, result.model_dump_json(indent=1))
    say(*lines)
