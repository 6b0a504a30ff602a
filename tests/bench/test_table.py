"""Planted methods get their verdicts, from a folder of ``analyze``, and figures are those worked out by hand."""

import random
import shutil
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pandas as pd
import pytest
import torch

from bench import table
from bench.__main__ import main
from bench.places import Label, Record, by_step, rows_of
from bench.statistics import above_controls, holm
from bench.table import ALIKE, FINDS, NOTHING, PLACED, SPARES, UNSCORED
from grail_advantage import AdvantageMethod, Method, Rollouts, Weights
from grail_advantage.answers.text import TokenTexts, edges_of
from grail_advantage.dump import DumpRow
from grail_advantage.method import METHODS, methods, register
from tests.bench.common import analyzed, write_lines


def solutions(path: Path) -> Path:
    """Sums of four to seven steps. In the first 60 of 120 a step is wrong, mostly a third of the way."""
    rng = random.Random(0)
    lines = []
    for number in range(120):
        steps = []
        value = rng.randint(1, 9)
        count = rng.randint(4, 7)
        wrong = None
        if number < 60:
            wrong = min(max(round(rng.gauss(0.33 * (count - 1), 0.5)), 0), count - 1)
        for step in range(count):
            term = rng.randint(1, 9)
            result = value + term + (rng.randint(1, 5) if step == wrong else 0)
            steps.append(f"{value}+{term}={result};" + "so then " * (rng.random() < 0.5))
            value = result
        steps[-1] += f"\\boxed{{{value}}}"
        lines.append(
            {
                "id": f"a{number}",
                "prompt": f"sum ({number})",
                "steps": steps,
                "error": wrong,
                "reward": float(wrong is None),
            }
        )
    return write_lines(path, lines)


def _wrong(text: str, starts_T: np.ndarray) -> np.ndarray:
    """1 in the first line whose equation is false."""
    begun = 0
    for line in text.splitlines(keepends=True):
        equation = line.split(";")[0]
        if "=" in equation:
            sides, right = equation.split("=")
            if sum(map(int, sides.split("+"))) != int(right):
                return ((starts_T >= begun) & (starts_T < begun + len(line))).astype(float)
        begun += len(line)
    return np.zeros(len(starts_T))


def _noise(text: str, starts_T: np.ndarray) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).random(len(starts_T))


PLANTED = {
    "perfect": _wrong,
    "flipped": lambda text, starts_T: 1 - _wrong(text, starts_T),
    "faint": lambda text, starts_T: (
        0.3 * _wrong(text, starts_T) + _noise(text, starts_T) * 0.5
    ),
    "noise": _noise,
    "alike": lambda text, starts_T: np.zeros(len(starts_T)),
    "earlier": lambda text, starts_T: 1 - starts_T / len(text),
    "later": lambda text, starts_T: starts_T / len(text),
    "usual_place": lambda text, starts_T: (
        1 - np.abs(starts_T / text.index("\\boxed") - 0.4)
    ),
    "numbers": lambda text, starts_T: np.array(
        [text[start : start + 1].isdigit() for start in starts_T], dtype=float
    ),
    "answers": lambda text, starts_T: np.where(
        starts_T >= text.index("\\boxed"), 1.0, 0.3 * _wrong(text, starts_T)
    ),
    "no_number": lambda text, starts_T: np.full(len(starts_T), np.nan),
    "crash": Mock(side_effect=IndexError("no such token")),
}


def planted_scores(name: str, r: Rollouts) -> torch.Tensor:
    """By the text of each response alone; writes into all that it gets."""
    assert not r.facts, "labels"
    texts = TokenTexts(r.tokenizer)
    scores_BT = torch.zeros(r.mask.shape)
    for row, mask_T in enumerate(r.mask):
        pieces = texts(r.tokens[row, mask_T].tolist())
        values_T = PLANTED[name]("".join(pieces), edges_of(pieces)[:-1])
        scores_BT[row, : len(pieces)] = torch.as_tensor(values_T)
    for values in (r.tokens, r.advantages, *r.columns.values()):
        values.fill_(1)
    return scores_BT


class Planted(Method):
    """Weight ``1 + 4 * value``."""

    reads = frozenset({"tokens", "old_log_probs"})
    planted: str = ""

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return planted_scores(self.planted, r)

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return Weights(1 + 4 * scores)


class Praise(AdvantageMethod):
    """A large positive advantage for the first error."""

    reads = Planted.reads
    planted: str = ""

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return torch.where(planted_scores(self.planted, r) > 0, 5.0, -0.1)


@pytest.fixture(scope="module", autouse=True)
def registered():
    with patch.dict(METHODS, methods()):
        register("planted")(Planted)
        register("praise")(Praise)
        yield


@pytest.fixture(scope="module")
def folder(registered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    chosen = {name: Planted(planted=name) for name in PLANTED}
    chosen["praise"] = Praise(planted="perfect")
    return analyzed(solutions(folder / "sums.jsonl"), folder / "seen", chosen)


def summary(folder: Path) -> tuple[dict[str, list[Record]], dict[str, table.Figures]]:
    records, _ = table.read(folder)
    return records, {name: table.figures_of(entries) for name, entries in records.items()}


def test_two_responses_of_one_id_are_refused(folder, tmp_path):
    """As in a folder to which somebody copied a file of another analysis."""
    merged = shutil.copytree(folder, tmp_path / "merged")
    last = max(merged.glob("step_*.parquet"))
    shutil.copy(last, last.with_name("step_000999.parquet"))
    with pytest.raises(ValueError, match="two responses have the id a"):
        rows_of(merged)


def test_planted_methods_get_their_verdicts(folder):
    _, figures = summary(folder)
    assert table.verdicts(figures) == {
        **dict.fromkeys(("first error", "perfect", "faint", "answers"), FINDS),
        **dict.fromkeys(("flipped", "praise"), SPARES),
        **dict.fromkeys(("place alone", "earlier", "usual_place"), PLACED),
        **dict.fromkeys(("noise", "later", "numbers", "kind alone"), NOTHING),
        **{"alike": ALIKE, "no_number": UNSCORED},
    }
    assert "Not measured: crash (IndexError: no such token)." in table.report(folder)
    # Place is nothing at equal place, and "earlier" is place alone to the last bit.
    earlier = figures["earlier"]
    assert earlier["equal place"].value == pytest.approx(0, abs=1e-9)
    assert earlier["AUROC"].value > 0.65
    assert earlier["earlier first"].value == 0
    # The wrong step's AUROC is 1, and any step's of a response without an error 0.5.
    assert figures["perfect"]["equal place"].value == pytest.approx(0.5)


def test_equal_place_follows_from_the_records(folder):
    """By plain loops over the controls that are nearest in number of steps."""
    records, figures = summary(folder)
    for method in ("noise", "faint", "usual_place"):
        controls = [record.auroc_M for record in records[method] if np.isnan(record.place)]
        gains = []
        for error in records[method]:
            if np.isnan(error.place):
                continue
            steps = len(error.auroc_M)
            apart = sorted(abs(len(control_M) - steps) for control_M in controls)[9]
            at_place = []
            for control_M in controls:
                if abs(len(control_M) - steps) <= apart:
                    place = error.place * (len(control_M) - 1)
                    at_place.append(np.interp(place, range(len(control_M)), control_M))
            gains.append(error.auroc - np.mean(at_place))
        assert figures[method]["equal place"].value == pytest.approx(
            np.mean(gains), abs=1e-8
        )


def test_other_advantages_are_refused(folder, tmp_path):
    method = Planted(planted="faint")
    analyzed(folder.parent / "sums.jsonl", tmp_path, {"one": method}, advantages="right")
    with pytest.raises(SystemExit, match="has not the advantage -1"):
        main([str(tmp_path)])


def test_steps_without_a_token_are_none():
    """Steps of two, no and two tokens, then the answer's and an end token, which has no text."""
    labels = {"steps": [[0, 2], [2, 2], [2, 4], [4, 6]]}
    row = DumpRow(labels=labels, tokens=["1", "+", "2", "a", " ", ""], mask_T=np.ones(6))
    label = table.label_of(row)
    assert label.step_T.tolist() == [0, 0, 1, 1, 2, -1]
    assert label.step is None
    # Number, sign, word, blank
    assert len(set(label.kind_T.tolist())) == 4
    labels["wrong_step"] = [2, 4]
    labels["answer"] = [4, 5]
    label = table.label_of(row)
    assert label.step_T.tolist() == [0, 0, 1, 1, -1, -1]
    assert label.step == 1
    # Neither a step that is the answer nor one without a token can be blamed.
    for tokens in ([4, 6], [2, 2]):
        labels["wrong_step"] = tokens
        assert table.label_of(row) is None


def test_step_figures_by_hand():
    """Step means 2, 5, 5 + rounding and 1: above one, two and a half, two and a half, and none of the three others."""
    values_T = np.array([1.0, 3.0, 5.0, 5.0 + 1e-12, 1.0, 9.0])
    step_T = np.array([0, 0, 1, 2, 3, -1])
    figures_M = by_step(values_T, Label(step_T, step_T))
    assert figures_M == pytest.approx([1 / 3, 2.5 / 3, 2.5 / 3, 0])


def test_intervals_above_controls_hold_the_truth():
    """95 % of them, where errors and controls are drawn anew and problems repeat."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(600):
        own_W = rng.normal(0.6, 0.1, 40) + np.repeat(rng.normal(0, 0.1, 20), 2)
        controls_C = rng.normal(0.5, 0.1, 30)
        apart_WC = rng.random((40, 30)) < 0.5
        apart_WC[:, 0] = False
        matrix_WC = np.where(apart_WC, np.nan, controls_C)
        problems_W = np.repeat(np.arange(20), 2)
        gain = above_controls(
            pd.Series(own_W, problems_W), pd.DataFrame(matrix_WC, problems_W)
        )
        covered.append(abs(gain.value - 0.1) <= gain.half)
    assert 0.92 < np.mean(covered) < 0.98


def test_holm_by_hand():
    # 4 * 0.01, 3 * 0.02, then 2 * 0.04, and 1 for the one that is not known.
    corrected = holm({"a": 0.01, "b": 0.04, "c": np.nan, "d": 0.02})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.08, "c": 1, "d": 0.06})


def test_what_is_left_out_is_counted(tmp_path):
    box = "2+1=3;\\boxed{3}"
    lines = [
        {"steps": ["1+1=2;", "2+1=4;", "4+1=5;\\boxed{5}"], "error": 1, "reward": 0},
        {"response": "1+1=2;\n\n2+1=4;\n4+1=5;\\boxed{5}", "error": [12, 13], "reward": 0},
        {"steps": ["1+1=2;", box], "error": None, "reward": 1},
        {"steps": ["1+1=2;", "2+1=3;"], "error": None, "reward": 1},
        {"steps": ["1+1=2;", box], "error": None, "reward": 0},
        {"steps": ["1+1=3;", box], "error": 0, "reward": 1},
        {"steps": [box], "error": 0, "reward": 0},
    ]
    path = write_lines(tmp_path / "lines.jsonl", [{"prompt": "a"} | line for line in lines])
    folder = analyzed(path, tmp_path / "seen", {"noise": Planted(planted="noise")})
    records, counts = table.read(folder)
    assert counts == {
        "errors": 2,
        "controls": 1,
        "without an answer": 1,
        "fewer than two steps to compare": 1,
        "no outcome or no first error known": 1,
        "correct in spite of an error": 1,
    }
    # The second of three steps is at 0.5, and the third solution has no error.
    places = [record.place for record in records[table.PLACE]]
    assert places == pytest.approx([0.5, 0.5, np.nan], nan_ok=True)
    _, figures = summary(folder)
    assert table.verdicts(figures)["noise"] == table.FEW
