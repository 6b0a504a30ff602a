"""Planted methods get their verdicts, from a folder of ``analyze``, and figures are those worked out by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import table
from bench.__main__ import main
from bench.places import Label, among, by_step
from bench.statistics import above_controls, holm
from bench.table import ALIKE, FINDS, NOTHING, PLACED, SPARES, UNSCORED, read, summary
from grail_advantage import AdvantageMethod, Method, Rollouts, Weights
from grail_advantage.analyze.command import analyze
from grail_advantage.analyze.lines import read_responses
from grail_advantage.answers.text import TokenTexts, edges_of
from grail_advantage.method import METHODS, methods, register
from verl_cpu.tiny.model import build_model, build_tokenizer


def solutions(path: Path, errors: int = 60, controls: int = 60) -> Path:
    """Sums of four to seven steps, of which the first wrong one is mostly a third of the way."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(errors + controls):
            steps = []
            value = rng.randint(1, 9)
            count = rng.randint(4, 7)
            wrong = (
                min(max(round(rng.gauss(0.33 * (count - 1), 0.5)), 0), count - 1)
                if number < errors
                else None
            )
            for step in range(count):
                term = rng.randint(1, 9)
                result = value + term + (rng.randint(1, 5) if step == wrong else 0)
                steps.append(f"{value}+{term}={result};" + "so then " * (rng.random() < 0.5))
                value = result
            steps[-1] += f"\\boxed{{{value}}}"
            line = {"id": f"a{number}", "prompt": f"sum ({number})", "steps": steps, "error": wrong}
            file.write(json.dumps(line | {"reward": float(wrong is None)}) + "\n")
    return path


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


def _crash(text: str, starts_T: np.ndarray) -> np.ndarray:
    raise IndexError("no such token")


PLANTED: dict[str, Callable[[str, np.ndarray], np.ndarray]] = {
    "perfect": _wrong,
    "flipped": lambda text, starts_T: 1 - _wrong(text, starts_T),
    "faint": lambda text, starts_T: 0.3 * _wrong(text, starts_T) + _noise(text, starts_T) * 0.5,
    "noise": _noise,
    "alike": lambda text, starts_T: np.zeros(len(starts_T)),
    "earlier": lambda text, starts_T: 1 - starts_T / len(text),
    "later": lambda text, starts_T: starts_T / len(text),
    "usual_place": lambda text, starts_T: 1 - np.abs(starts_T / text.index("\\boxed") - 0.4),
    "numbers": lambda text, starts_T: np.array(
        [text[start : start + 1].isdigit() for start in starts_T], dtype=float
    ),
    "answers": lambda text, starts_T: np.where(
        starts_T >= text.index("\\boxed"), 1.0, 0.3 * _wrong(text, starts_T)
    ),
    "no_number": lambda text, starts_T: np.full(len(starts_T), np.nan),
    "crash": _crash,
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
def registered() -> Iterator[None]:
    registry = methods()
    register("planted")(Planted), register("praise")(Praise)
    yield
    METHODS.clear()
    METHODS.update(registry)


@pytest.fixture(scope="module")
def folder(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    chosen: dict[str, Method] = {name: Planted(planted=name) for name in PLANTED}
    chosen["praise"] = Praise(planted="perfect")
    tokenizer = build_tokenizer()
    lines = read_responses(solutions(folder / "sums.jsonl"))
    analyze(
        lines,
        chosen,
        folder / "seen",
        tokenizer,
        lambda: build_model(tokenizer, 0).eval(),
        model="m",
    )
    return folder / "seen"


def test_planted_methods_get_their_verdicts(folder: Path) -> None:
    results = read(folder)
    figures, verdicts = summary(results)
    assert verdicts == {
        **dict.fromkeys(("first error", "perfect", "faint", "answers"), FINDS),
        **dict.fromkeys(("flipped", "praise"), SPARES),
        **dict.fromkeys(("place alone", "earlier", "usual_place"), PLACED),
        **dict.fromkeys(("noise", "later", "numbers", "kind alone"), NOTHING),
        **{"alike": ALIKE, "no_number": UNSCORED},
    }
    assert results.about["failed"] == {"crash": "IndexError: no such token"}
    assert results.counts == {"errors": 60, "controls": 60}
    # Place is nothing at equal place, and "earlier" is place alone to the last bit.
    assert figures["earlier"]["equal place"].value == pytest.approx(0, abs=1e-9)
    assert (
        figures["earlier"]["AUROC"].value > 0.65 and figures["earlier"]["earlier first"].value == 0
    )
    assert figures["perfect"]["equal place"].value == pytest.approx(0.5)


def test_equal_place_follows_from_the_records(folder: Path) -> None:
    """By plain loops over the controls that are nearest in number of steps."""
    results = read(folder)
    figures, _ = summary(results)
    for method in ("noise", "faint", "usual_place"):
        records = results.records[method].values()
        errors = [record for record in records if record.step is not None]
        controls = [record.auroc_M for record in records if record.step is None]
        gains = []
        for error in errors:
            steps = len(error.auroc_M)
            apart = sorted(abs(len(control_M) - steps) for control_M in controls)[9]
            near = [control_M for control_M in controls if abs(len(control_M) - steps) <= apart]
            places = [error.step / (steps - 1) * (len(control_M) - 1) for control_M in near]
            at = [
                np.interp(place, range(len(record)), record)
                for place, record in zip(places, near, strict=True)
            ]
            gains.append(error.auroc_M[error.step] - np.mean(at))
        assert figures[method]["equal place"].value == pytest.approx(np.mean(gains), abs=1e-8)


def test_other_advantages_are_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    lines = read_responses(folder.parent / "sums.jsonl")
    model = build_model(tokenizer, 0).eval()
    analyze(
        lines,
        {"one": Planted(planted="faint")},
        tmp_path,
        tokenizer,
        lambda: model,
        model="m",
        advantages="right",
    )
    with pytest.raises(SystemExit, match="has not the advantage -1"):
        main([str(tmp_path)])


def test_figures_by_hand() -> None:
    """Three steps of two tokens; the fourth holds the answer."""
    values_T = np.array([3.0, 1.0, 3.0, 2.0, 0.0, 1.0, 9.0])
    step_T = np.array([0, 0, 1, 1, 2, 2, 3])
    kind_T = np.array([1, 2, 1, 2, 1, 2, 1])
    label = among(Label(step_T, kind_T, 1), np.arange(7) < 6)
    assert label.step == 1 and label.step_T.tolist() == [0, 0, 1, 1, 2, 2, -1]
    figures = by_step(values_T, label)
    assert figures.tolist() == [0.5, 1, 0]
    # Steps without a compared token are none; an error among them is no label.
    assert among(Label(step_T, kind_T, 3), np.arange(7) < 6) is None
    assert among(Label(step_T, kind_T, 1), step_T != 0).step == 0
    assert among(Label(step_T, kind_T), np.arange(7) < 2) is None


def test_step_figures_are_those_of_plain_loops() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        length = int(rng.integers(8, 30))
        steps = int(rng.integers(2, 6))
        step_T = np.sort(np.concatenate([np.arange(steps), rng.integers(0, steps, length - steps)]))
        values_T = rng.integers(0, 4, length).astype(float)
        figures = by_step(values_T, Label(step_T, step_T))
        means = [values_T[step_T == step].mean() for step in range(steps)]
        for step in range(steps):
            peers = np.delete(means, step)
            assert figures[step] == pytest.approx(
                np.mean([(o < means[step]) + (o == means[step]) / 2 for o in peers])
            )


def test_intervals_above_controls_hold_the_truth() -> None:
    """95 % of them, where errors and controls are drawn anew and problems repeat."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(600):
        own_W = rng.normal(0.6, 0.1, 40) + np.repeat(rng.normal(0, 0.1, 20), 2)
        controls_C = rng.normal(0.5, 0.1, 30)
        apart_WC = rng.random((40, 30)) < 0.5
        apart_WC[:, 0] = False
        matrix_WC = np.where(apart_WC, np.nan, controls_C)
        gain = above_controls(own_W, matrix_WC, list(np.repeat(np.arange(20), 2)), list(range(30)))
        covered.append(abs(gain.value - 0.1) <= gain.half)
    assert 0.92 < np.mean(covered) < 0.98
    assert holm([0.01, 0.04, np.nan, 0.02]) == pytest.approx([0.04, 0.08, 1, 0.06])


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
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
    path = tmp_path / "lines.jsonl"
    tokenizer = build_tokenizer()
    path.write_text("\n".join(json.dumps({"prompt": "a"} | line) for line in lines))
    responses = read_responses(path)
    methods = {"noise": Planted(planted="noise")}
    analyze(
        responses,
        methods,
        tmp_path / "seen",
        tokenizer,
        lambda: build_model(tokenizer, 0).eval(),
        model="m",
    )
    results = read(tmp_path / "seen")
    assert results.counts == {
        **{
            "errors": 2,
            "controls": 1,
            "without an answer": 1,
            "fewer than two steps to compare": 1,
        },
        **{"no outcome or no first error known": 1, "correct in spite of an error": 1},
    }
    firsts = {
        key: (record.step, len(record.auroc_M))
        for key, record in results.records[table.PLACE].items()
    }
    assert firsts == {"1": (1, 3), "2": (1, 3), "3": (None, 2)}
    assert summary(results)[1]["noise"] == table.FEW
