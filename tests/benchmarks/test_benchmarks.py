"""The benchmarks: what they measure with, what the report makes of it, and that each runs at toy size. No time is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_methods
import bench_whole_step
import report

from grail_advantage.methods import methods
from grail_advantage.signals.base import SEQUENCES
from recipe.marked_text import marked
from recipe.tiny.model import build_model, build_tokenizer

ROOT = Path(__file__).parents[2]

TINY = [
    *("--layers", "2", "--hidden", "32", "--intermediate", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"),
    *("--vocabulary", "256", "--rows", "4", "--tokens", "120", "--prompt", "4", "--micro-batch-rows", "2"),
]


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def _result(process: subprocess.CompletedProcess[str], path: Path) -> dict:
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(path.read_text())


class TestMethods:
    @staticmethod
    def _method(uses: str, rows: tuple[int, int], *repeats: tuple[float, ...]) -> dict:
        stages = [dict(zip(bench_methods.STAGES, seconds, strict=True)) for seconds in repeats]
        return {"uses": uses, "rows": rows[0], "timed_rows": rows[1], "repeats": stages}

    def test_steps_by_hand(self) -> None:
        """F is 2 s and an update 6 s; the backward on the shared forward takes 0.7 s."""
        found = {
            "uniform": self._method("", (0, 0), (2.0, 0.0, 0.0, 6.0)),
            "shared": self._method("saliency", (7, 7), (2.7, 0.0, 0.1, 6.0)),
            "own": self._method("log_probs", (20, 20), (2.0, 2.5, 0.0, 6.0)),
            "sampled": self._method("sequences", (20, 2), (2.0, 1.5, 1.0, 6.0)),
        }
        got = bench_methods.compared(found)
        assert {name: of_method["forwards"] for name, of_method in got.items()} == pytest.approx(
            {"uniform": 0.0, "shared": 0.4, "own": 1.25, "sampled": 8.0}
        )
        for of_method in got.values():
            assert of_method["ratios"] == pytest.approx([of_method["ratio"]])
        assert got["shared"]["ratio"] == pytest.approx(1.1)
        assert got["sampled"]["ratio"] == pytest.approx(3.0)


class TestWholeStep:
    def test_a_larger_model_is_the_same_function(self) -> None:
        model = build_model(build_tokenizer(), seed=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        larger = bench_whole_step.enlarge(model, 5, 1024)
        tokens = torch.randint(0, 200, (2, 30), generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(larger(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)
        blocks = [sum(p.numel() for p in of.model.layers.parameters()) for of in (model, larger)]
        assert blocks[1] > 3 * blocks[0]

    def test_a_step_lies_between_two_notes_and_the_first_do_not_count(self) -> None:
        methods_in_turn = ["grpo", "uniform", "grail", "grail", "uniform", "grpo", "grpo", "uniform", "grail"]
        notes = [
            {"step": step, "method": method, "seconds": {"raylet": 1.0 * step, "ray::Worker": 10.0 * step**2}}
            for step, method in enumerate(methods_in_turn, start=1)
        ]
        notes[-1]["seconds"]["new"] = 0.5
        logged = {
            step: {"response_length/mean": 30.0, "timing_s/gen": 2.0, "lr": 0}
            | ({} if method == "grpo" else {f"{method}/selected_rate": 0.4, "token_weights/skipped_rows": 3})
            for step, method in enumerate(methods_in_turn, start=1)
        }
        first, second = bench_whole_step._steps(notes, logged)
        assert first == {
            "method": "grpo",
            "seconds": {"raylet": 1.0, "ray::Worker": 150.0},
            "selected_rate": 0.0,
            "skipped_rows": 0,
            "tokens": 30.0,
            "wall": {"timing_s/gen": 2.0},
        }
        assert (second["method"], second["skipped_rows"], second["selected_rate"]) == ("uniform", 3, 0.4)
        assert second["seconds"] == {"raylet": 1.0, "ray::Worker": 170.0, "new": 0.5}

    def test_ratio_of_sums(self) -> None:
        assert report.ratio_of_sums([2.0, 4.0], [1.0, 2.0]) == (2.0, 2.0, 2.0)
        ratio, low, high = report.ratio_of_sums([1.1, 1.0, 1.3, 1.0], [1.0, 1.1, 1.0, 1.2])
        assert ratio == pytest.approx(4.4 / 4.3)
        assert low < ratio < high


@pytest.mark.slow
def test_every_benchmark_runs_and_is_reported(tmp_path: Path) -> None:
    where = ["--results", str(tmp_path)]
    arguments = [*TINY, "--repeats", "1", *where]
    process = _run("bench_methods.py", "--layout", "packed", *arguments)
    found = _result(process, tmp_path / "methods-cpu.json")["methods"]
    built_in = {name: of for name, of in methods().items() if of.signal_class.__module__.startswith("grail_advantage.")}
    assert set(found) >= set(built_in)
    for name, method in built_in.items():
        signal = method.build({})
        assert found[name]["timed_rows"] == (
            min(found[name]["rows"], bench_methods.SAMPLE_ROWS if signal.uses == SEQUENCES else 4) if signal.uses else 0
        )
        assert found[name]["ratio"] > 0

    few = ["--neutral", "0", "0.5", "--epochs", "1", "--gradient-checkpointing", "off"]
    _, run = _result(_run("bench_neutral_rows.py", *few, *arguments), tmp_path / "neutral_rows-cpu.json")["runs"]
    assert run["neutral_rows"] == 2
    assert {len(seconds) for (repeat,) in [run["repeats"]] for seconds in repeat.values()} == {2}

    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    front_page = tmp_path / "FRONT.md"
    front_page.write_text("<!-- cost -->\n<!-- /cost -->\n")
    process = _run("report.py", *where, "--readme", str(readme), "--front-page", str(front_page))
    assert process.returncode == 0, process.stderr
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    for title in ("Rows that train nothing, cpu", "What each method adds to a step, cpu"):
        assert f"### {title}" in text
    assert "| rows without an advantage | 0% | 50% |" in front_page.read_text()


def test_front_page_shows_the_recorded_results() -> None:
    shown = marked(report.FRONT_PAGE.read_text(encoding="utf-8"), report.FRONT_PAGE_MARKER)
    assert shown == report.summary(report.RESULTS), "run `python benchmarks/report.py`"
