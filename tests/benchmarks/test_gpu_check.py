"""The GPU check without a GPU: its parts at toy size on the CPU, what it makes of failures, and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_check.__main__ as command
from gpu_check import engine, flash, page, parts, plain, runs
from gpu_check.outcome import FAILED, NOT_RUN, PASSED, Outcome
from gpu_check.parts import PARTS, Part

from grail_advantage import GrailConfig
from recipe.marked_text import marked

ROOT = Path(__file__).parents[2]
RECORD = {
    "name": "a",
    "device": "cuda",
    "date": "2026-01-02 03:04 UTC",
    "command": "bash scripts/gpu_check.sh a",
    "hardware": "NVIDIA Made-up, 80 GiB",
    "versions": {"torch": "0.0"},
}


def outcome(folder: Path) -> Outcome:
    return Outcome(folder / "a.json", RECORD)


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in result["checks"]}


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script sets it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]))


@pytest.mark.slow
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_a_part_at_toy_size(tmp_path: Path, letter: str) -> None:
    result = parts.execute(PARTS[letter], tmp_path, "cpu")
    assert json.loads((tmp_path / f"{letter}.json").read_text()) == result
    assert result["status"] == PASSED and len(result["checks"]) > 4, result
    figures, shown = result["figures"], page.render(tmp_path)
    assert f"`bash scripts/gpu_check.sh --dry {letter}`" in shown and page.NOTHING not in shown
    if letter == "a":
        assert set(figures["precision, toy"]) == set(plain.METHODS)
        passes = figures["passes, toy"]
        assert len(passes["ways"]) == 7
        assert all(way["peak_bytes"] > passes["base_bytes"] for way in passes["ways"].values())
        assert "Shape of toy, random weights" in shown and "| grail, checkpointed |" in shown
    elif letter == "b":
        assert [set(figures[f"curve, {method}"]) for method in runs.METHODS] == [{"0", "1", "2"}] * 2
        assert "| step | held-out accuracy | mean reward |" in shown
    else:
        of_run = figures["training side, toy, checkpointing on"]
        assert of_run["epochs"] == 4 and of_run["parameters"] == "fp32, computing in bfloat16"
        assert {len(seconds) for repeat in of_run["repeats"] for seconds in repeat.values()} == {5}
        assert engine.WITHOUT in shown and "| GRAIL, skipping |" in shown


@pytest.mark.slow
def test_flash_attentions_reference(tmp_path: Path) -> None:
    found = outcome(tmp_path)
    flash.run(found, "cpu")
    layouts = statuses(found.result)
    assert len(layouts) == 6 and {status for name, status in layouts.items() if "1 GPU" in name} == {PASSED}
    assert {status for name, status in layouts.items() if "2 GPUs" in name} == {NOT_RUN}


@pytest.mark.slow
@pytest.mark.usefixtures("path")
def test_part_a_needs_nothing_but_torch_transformers_and_numpy() -> None:
    heavy = (
        "'verl', 'tensordict', 'omegaconf', 'hydra', 'matplotlib', 'pyarrow', 'ray', 'vllm', 'math_verify', 'pytest'"
    )
    program = (
        f"import sys, gpu_check.__main__, gpu_check.one_part, gpu_check.plain; print({{{heavy}}} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("path")
def test_no_part_needs_pytest() -> None:
    modules = ", ".join([*(part.module for part in PARTS.values()), "tests.verl_ext.gpu_checks"])
    program = f"import sys; sys.modules['pytest'] = None; import {modules}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr


class TestPlain:
    def test_differences_by_hand(self) -> None:
        nan = float("nan")
        exact = SimpleNamespace(
            scores=torch.tensor([[nan, 1.0, 2.0, 3.0], [nan, 3.0, 1.0, nan]]),
            weights=torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 9.0]]),
        )
        found = SimpleNamespace(
            scores=torch.tensor([[nan, 1.0, 3.0, 2.0], [nan, 9.0, 1.0, nan]]),
            weights=torch.tensor([[7.0, 1.5, 2.0, 3.0], [0.0, 1.0, 0.0, 0.0]]),
        )
        got = plain.compared(found, exact)  # type: ignore[arg-type]
        # Off by 0.5, 0, 0 and 0, 1; rank correlation 1 - 6 * 2 / (3 * 8) = 0.5 in the first row and 1 in the second.
        assert (got["mean"], got["max"]) == (pytest.approx(0.3), 1.0)
        assert got["rank_correlation"] == pytest.approx(0.75)

    def test_weights_that_differ_are_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every other call gets the weights of another method, as a wrong kernel might give other ones."""
        calls = iter(range(100))
        other = GrailConfig("robust", statistics="response", gate="correct")

        def wrong(model: Any, signal: Any, rows: Any, right: Any = plain.weights) -> Any:
            return right(model, signal if next(calls) % 2 else other, rows)

        monkeypatch.setattr(plain, "weights", wrong)
        found = outcome(tmp_path)
        plain.against_cpu(found, "cpu", plain.TOY)
        assert set(statuses(found.result).values()) == {FAILED}

    def test_memory_is_judged(self, tmp_path: Path) -> None:
        fits, none = {"peak_bytes": 100}, {"out_of_memory": True}
        found = outcome(tmp_path)
        plain._judge_passes(
            found,
            "x",
            {
                "grail": {"peak_bytes": 101},
                "training": fits,
                "grail, checkpointed": none,
                "training, checkpointed": none,
            },
        )
        assert list(statuses(found.result).values()) == [FAILED, PASSED, FAILED]
        found = outcome(tmp_path)
        plain._judge_passes(
            found,
            "x",
            {"grail": none, "training": none, "grail, checkpointed": fits, "training, checkpointed": none},
        )
        assert list(statuses(found.result).values()) == [PASSED] * 3


class TestOutcome:
    def test_a_group_that_raises_does_not_stop_the_next(self, tmp_path: Path) -> None:
        found = outcome(tmp_path)
        with found.attempt("first"):
            raise ValueError("it broke\nhere")
        with found.attempt("second"):
            found.check("holds", True, "yes")
        with found.attempt("third"):
            raise torch.cuda.OutOfMemoryError("4 GiB")
        assert json.loads((tmp_path / "a.json").read_text())["checks"] == [
            {"name": "first", "status": FAILED, "said": "ValueError: it broke"},
            {"name": "holds", "status": PASSED, "said": "yes"},
            {"name": "third", "status": NOT_RUN, "said": "the GPU's memory is too small for it"},
        ]


STUBS = {
    "passes": "outcome.check('holds', True, 'yes')",
    "breaks": "outcome.check('holds', True, 'yes'); print('last words', flush=True); os._exit(3)",
    "raises": "raise RuntimeError('no luck')",
}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes parts of the modules in STUBS."""
    for name, body in STUBS.items():
        (tmp_path / f"stub_{name}.py").write_text(f"import os\ndef run(outcome, device):\n    {body}\n")
    path = [str(tmp_path), str(ROOT), str(ROOT / "benchmarks")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return lambda name, *needs: Part(name[0], f"stub {name}", f"stub_{name}", needs)


class TestExecution:
    def test_a_part_that_lacks_a_package_is_not_run(self, tmp_path: Path, stub: Any) -> None:
        part = stub("passes", "torch", "no_such_module", "nor_this")
        result = parts.execute(part, tmp_path, "cpu")
        assert result["status"] == NOT_RUN
        assert result["checks"][0]["said"].startswith("needs no_such_module, nor_this: scripts/setup_gpu.sh")
        assert json.loads((tmp_path / "p.json").read_text()) == result
        # What an earlier run found stays.
        parts.write(tmp_path / "p.json", {"status": PASSED})
        assert parts.execute(part, tmp_path, "cpu")["status"] == NOT_RUN
        assert json.loads((tmp_path / "p.json").read_text()) == {"status": PASSED}

    @pytest.mark.slow
    def test_a_part_that_breaks_keeps_what_it_had(self, tmp_path: Path, stub: Any) -> None:
        result = parts.execute(stub("breaks"), tmp_path, "cpu")
        assert (result["status"], statuses(result)) == (FAILED, {"holds": PASSED, "runs to its end": FAILED})
        assert result["output"][-1] == "last words"

    def test_a_part_that_takes_too_long_is_stopped(self, tmp_path: Path, stub: Any) -> None:
        result = parts.execute(stub("passes"), tmp_path, "cpu", limit=0.01)
        assert (result["status"], statuses(result)) == (FAILED, {"ends within 0.000166667 minutes": FAILED})


class TestCommand:
    @pytest.mark.slow
    def test_a_failing_part_does_not_stop_the_others(
        self, tmp_path: Path, stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command, "why_not", lambda: None)
        execute = parts.execute
        monkeypatch.setattr(command, "execute", lambda part, folder, *_: execute(part, folder, "cpu"))
        made = {"a": stub("raises"), "b": stub("passes"), "c": stub("passes", "no_such_module")}
        made = {letter: Part(letter, part.title, part.module, part.needs) for letter, part in made.items()}
        for module in (command, page):
            monkeypatch.setattr(module, "PARTS", made)
        shown = tmp_path / "page.md"
        shown.write_text("before\n<!-- results -->\n<!-- /results -->\nafter\n")
        assert command.main([], tmp_path / "results", shown) == 1
        printed = capsys.readouterr().out
        assert "a: failed\n   failed: runs to its end (exit status 1)\nb: passed\nc: not run\n" in printed
        assert "not run: stub passes (needs no_such_module:" in printed
        text = shown.read_text()
        assert "**failed**" in text and "**passed**" in text and "**not run**" in text and text.endswith("after\n")
        assert command.main(["c"], tmp_path / "results", shown) == 1
        assert command.main(["b"], tmp_path / "results", shown) == 0

    def test_without_a_gpu_nothing_runs(self) -> None:
        before = sorted(page.RESULTS.glob("*")), page.PAGE.read_bytes()
        environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        found = subprocess.run(
            ["bash", str(ROOT / "scripts/gpu_check.sh")], cwd="/", env=environment, capture_output=True, text=True
        )
        assert (found.returncode, found.stdout) == (1, "")
        assert "sees no GPU on this machine: nothing was checked" in found.stderr
        assert before == (sorted(page.RESULTS.glob("*")), page.PAGE.read_bytes())


class TestEngine:
    def test_ratios_by_hand(self) -> None:
        repeats = [
            {"GRPO": [1.0, 2.0, 2.0], "GRAIL": [1.5, 2.0, 3.5]},
            {"GRPO": [1.0, 3.0, 3.0], "GRAIL": [1.0, 3.0, 3.0]},
        ]
        assert engine.ratios({"repeats": repeats}, "GRAIL", 1) == [pytest.approx(3.5 / 3), 1.0]
        assert engine.ratios({"repeats": repeats}, "GRAIL", 2) == [pytest.approx(7 / 5), 1.0]

    @pytest.mark.parametrize(("gigabytes", "layers"), [(151, 36), (85, 23), (24, 1)])
    def test_layers_that_fit(self, monkeypatch: pytest.MonkeyPatch, gigabytes: int, layers: int) -> None:
        """A block takes 100.9 M x 20 bytes + 0.10 GB = 2.12 GB; embeddings 7.78, logits 18.67, the rest 8.59 GB."""
        properties = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        found = engine.layers_that_fit(plain.FULL.shapes["Qwen3-4B"], "cuda", 20480)
        assert found == layers


def test_a_run_is_shown_while_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that stops early fails."""
    line = json.dumps({"step": 1, "data": {"critic/score/mean": 0.25, "timing_s/step": 3.0}})
    (tmp_path / "run.py").write_text(
        f"open('metrics.jsonl', 'w').write({line!r} + chr(10)); print('one'); exit('no luck')"
    )
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    found = outcome(tmp_path)
    runs.train(found, "x", [sys.executable, str(tmp_path / "run.py")], tmp_path, 2)
    assert found.result["figures"]["curve, x"] == {"1": {"reward": 0.25, "seconds": 3.0}}
    [check] = found.result["checks"]
    assert check["status"] == FAILED and check["said"] == "1 of 2, exit status 1: no luck"


class TestPage:
    def test_made_up_result(self, tmp_path: Path) -> None:
        checks = [
            {"name": "first | second", "status": PASSED, "said": "1 | 2"},
            {"name": "third", "status": NOT_RUN, "said": "needs two GPUs"},
        ]
        ways = {
            "forward": {"seconds": [0.3, 0.1, 0.2], "peak_bytes": 2 * 2**30},
            "training": {"out_of_memory": True},
            "grail": {"seconds": [0.5], "peak_bytes": 3 * 2**30},
        }
        figures = {"passes, Qwen3-4B": {"tokens": 4096, "base_bytes": 2**30, "ways": ways}}
        result = {**RECORD, "revision": "abc", "status": PASSED, "seconds": 61.4, "checks": checks, "figures": figures}
        parts.write(tmp_path / "a.json", result)
        shown = page.render(tmp_path)
        assert "2026-01-02 03:04 UTC, revision abc. NVIDIA Made-up, 80 GiB. torch 0.0." in shown
        assert "| first \\| second | passed | 1 \\| 2 |\n| third | not run | needs two GPUs |" in shown
        assert "| forward | 0.200 | 1.00 | 2.00 | 1.00 |" in shown
        assert "| training | | | out of memory | |" in shown
        assert "| grail | 0.500 | 2.50 | 3.00 | 2.00 |" in shown

    def test_page_shows_the_recorded_results(self) -> None:
        shown = marked(page.PAGE.read_text(encoding="utf-8"), page.MARKER)
        assert shown == page.render(page.RESULTS), "run PYTHONPATH=.:benchmarks python -m gpu_check.page"
