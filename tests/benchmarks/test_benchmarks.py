"""The benchmarks: what they measure with, and that they run at toy size. No time is checked."""

import json

import pytest

from benchmarks import timer
from benchmarks.bench_training_step import UNMEASURED, Seconds, compared
from grail_advantage.method import methods
from tests import forked


def test_steps_by_hand():
    """A forward pass is 2 s and an update 6 s."""
    repeats = {
        "uniform": [Seconds(2.0, 0.0, 0.0, 6.0)] * 3,
        "saliency": [Seconds(2.0, 0.7, 0.1, 6.0)] * 3,
        "log_probs": [
            Seconds(2.0, 2.5, 0.0, 7.0),
            Seconds(1.0, 2.0, 0.0, 6.0),
            Seconds(2.0, 3.0, 0.0, 6.0),
        ],
    }
    # 2 + 0.7 + 0.1 + 6 s, and two further epochs of 6 s.
    assert repeats["saliency"][0].with_epochs(3) == pytest.approx(8.8 + 12.0)
    got = compared(repeats)
    # What the pass adds, by the median forward of 2 s; steps by medians: 8, 8.8 and 10.5 s.
    expected = {"uniform": [0.0] * 3, "saliency": [0.4] * 3, "log_probs": [1.25, 1.0, 1.5]}
    for name, forwards in expected.items():
        assert got[name]["forwards"] == pytest.approx(forwards)
    assert {name: figure["ratio"] for name, figure in got.items()} == pytest.approx(
        {"uniform": 1.0, "saliency": 1.1, "log_probs": 10.5 / 8}
    )


def test_every_variant_is_the_first_once():
    called = []
    variants = {
        name: lambda name=name: called.append(name) or len(called) for name in "abc"
    }
    results = timer.in_turn(variants, 3)
    assert "".join(called) == "abcabcbcacab"
    # By the number of the call; the first three are dropped.
    assert results == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_several_figures_are_a_median_with_its_range():
    rows = {
        "one": {"seconds": [1.0, 2.0, 4.0, 9.0]},
        "two": {"seconds": [0.123456], "": "text"},
    }
    assert timer.table(rows)[2:] == ["| one | 3 (1 to 9) |  |", "| two | 0.1235 | text |"]


@pytest.mark.slow
def test_the_benchmark_of_methods_runs(tmp_path):
    """The other one times the same steps as part c of the GPU check, which ``test_gpu_check.py`` runs."""
    options = ("--setup", "toy", "--repeats", "1", "--json", str(tmp_path / "methods.json"))
    done = forked.run("benchmarks.bench_training_step", "methods", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "methods.json").read_text())["methods"]
    assert figures.keys() == methods().keys() - set(UNMEASURED)
    assert all(figure["ratio"] > 0 for figure in figures.values())
    assert f"| grail | {figures['grail']['rows']} | " in done.stdout
