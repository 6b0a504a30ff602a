"""The benchmarks: what they measure with, what the report makes of it, and that each runs at toy size. No time is checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import bench_training_step, report, timer
from grail_advantage.method import build, methods
from tests import forked


def _method(uses: str, rows: tuple[int, int], *repeats: tuple[float, ...]) -> dict:
    stages = [dict(zip(bench_training_step.STAGES, seconds, strict=True)) for seconds in repeats]
    return {"uses": uses, "rows": rows[0], "timed_rows": rows[1], "repeats": stages}


def test_steps_by_hand() -> None:
    """A forward pass is 2 s and an update 6 s."""
    found = {
        "uniform": _method("", (0, 0), (2.0, 0.0, 0.0, 6.0)),
        "saliency": _method("saliency", (7, 7), (2.0, 0.7, 0.1, 6.0)),
        "own": _method("log_probs", (20, 20), (2.0, 2.5, 0.0, 6.0)),
        "sampled": _method("sequences", (20, 2), (2.0, 1.5, 1.0, 6.0)),
    }
    got = bench_training_step.compared(found)
    assert {name: of_method["forwards"] for name, of_method in got.items()} == pytest.approx(
        {"uniform": 0.0, "saliency": 0.4, "own": 1.25, "sampled": 8.0}
    )
    for of_method in got.values():
        assert of_method["ratios"] == pytest.approx([of_method["ratio"]])
    assert got["saliency"]["ratio"] == pytest.approx(1.1)
    assert got["sampled"]["ratio"] == pytest.approx(3.0)


def test_ratios_by_hand() -> None:
    repeats = [{"a": [1.0, 2.0, 2.0], "b": [1.5, 2.0, 3.5]}, {"a": [1.0, 3.0, 3.0], "b": [1.0, 3.0, 3.0]}]
    assert bench_training_step.ratios(repeats, "b", "a", 1) == [pytest.approx(3.5 / 3), 1.0]
    assert bench_training_step.ratios(repeats, "b", "a", 2) == [pytest.approx(7 / 5), 1.0]


def test_every_variant_is_the_first_once() -> None:
    called: list[str] = []
    variants = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    first, *_ = timer.in_turn(variants, 3)
    assert "".join(called) == "abcabcbcacab"
    assert first == {"a": 4, "b": 5, "c": 6}


@pytest.mark.slow
def test_the_benchmark_of_methods_runs_and_is_reported(tmp_path: Path) -> None:
    """The other one times the same steps as part c of the GPU check, which ``test_gpu_check.py`` runs."""
    options = ("--setup", "toy", "--repeats", "1", "--results", str(tmp_path))
    done = forked.run("benchmarks.bench_training_step", "methods", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "methods-cpu.json").read_text())["methods"]
    for name in methods():
        uses = build(name).uses
        rows = 2 if uses == "sequences" else 4
        assert found[name]["timed_rows"] == (min(found[name]["rows"], rows) if uses else 0)
        assert found[name]["ratio"] > 0
    shutil.copy(timer.RESULTS / "zero_advantage-cpu.json", tmp_path)
    text = report.render(tmp_path)
    assert "### Zero-advantage responses, cpu" in text and "### What each method adds to a step, cpu" in text
    assert "| zero-advantage responses | 0% | 25% | 50% | 75% |" in report.summary(tmp_path)
