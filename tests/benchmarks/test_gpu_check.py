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
from gpu_check import engine, page, parts, plain, smoke
from gpu_check.outcome import FAILED, NOT_RUN, PASSED, Outcome
from gpu_check.parts import Part
from gpu_check.pytest_checks import run_tests

from grail_advantage import GrailConfig
from recipe.marked_text import marked

ROOT = Path(__file__).parents[2]
SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TINY = plain.Size(shapes={"Qwen3-toy": SMALL}, small=SMALL, weighed=(2, 80), tokens=80, prompt=16, repeats=2)
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


class TestPlain:
    @pytest.mark.slow
    def test_the_part_at_toy_size_and_its_page(self, tmp_path: Path) -> None:
        found = outcome(tmp_path)
        plain.run(found, "cpu", TINY)
        assert json.loads((tmp_path / "a.json").read_text()) == found.result
        assert statuses(found.result) == dict.fromkeys(
            [
                "grail, official: weights of the device are the CPU's",
                "grail, robust: weights of the device are the CPU's",
                "Qwen3-toy, grail, official: bfloat16 keeps the weights",
                "Qwen3-toy, grail, robust: bfloat16 keeps the weights",
                "Qwen3-toy: GRAIL's pass needs less memory than training",
                "Qwen3-toy: GRAIL's checkpointed pass needs less memory than training",
                "Qwen3-toy: checkpointing saves memory in GRAIL's pass",
            ],
            PASSED,
        )
        precision = found.result["figures"]["precision, Qwen3-toy"]
        assert set(precision) == set(plain.METHODS)
        for of_method in precision.values():
            assert 0 < of_method["mean"] <= of_method["q99"] <= of_method["max"]
        ways = found.result["figures"]["passes, Qwen3-toy"]["ways"]
        assert len(ways) == 7 and all(len(way["seconds"]) == TINY.repeats for way in ways.values())
        base = found.result["figures"]["passes, Qwen3-toy"]["base_bytes"]
        assert all(way["peak_bytes"] > base for way in ways.values())

        parts.write(tmp_path / "a.json", {**found.result, "status": PASSED, "seconds": 3.2})
        shown = page.render(tmp_path)
        assert "`bash scripts/gpu_check.sh a`, 2026-01-02 03:04 UTC. NVIDIA Made-up, 80 GiB. torch 0.0." in shown
        assert "**passed**, 3 s" in shown and page.NOTHING not in shown
        assert "Shape of Qwen3-toy, random weights" in shown and "| grail, checkpointed |" in shown

    @pytest.mark.slow
    def test_needs_nothing_but_torch_transformers_and_numpy(self) -> None:
        heavy = "'verl', 'tensordict', 'omegaconf', 'hydra', 'matplotlib', 'pyarrow', 'ray', 'vllm', 'math_verify'"
        program = f"import sys, gpu_check.__main__, gpu_check.one_part, gpu_check.plain; print({{{heavy}}} & set(sys.modules))"
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
        found = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert found.stdout == "set()\n", found.stdout + found.stderr

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
        plain.against_cpu(found, "cpu", TINY)
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
        assert result["checks"][0]["said"].startswith("needs no_such_module, nor_this; bash scripts/setup_gpu.sh")
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
        monkeypatch.setattr(command, "execute", lambda part, folder: execute(part, folder, "cpu"))
        made = {"a": stub("raises"), "b": stub("passes"), "c": stub("passes", "no_such_module")}
        made = {letter: Part(letter, part.title, part.module, part.needs) for letter, part in made.items()}
        for module in (command, page):
            monkeypatch.setattr(module, "PARTS", made)
        shown = tmp_path / "page.md"
        shown.write_text("before\n<!-- results -->\n<!-- /results -->\nafter\n")
        assert command.main([], tmp_path / "results", shown) == 1
        printed = capsys.readouterr().out
        assert "a: failed\n   failed: runs to its end (exit status 1)\nb: passed\nc: not run\n" in printed
        assert "not run: stub passes (needs no_such_module;" in printed
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
    def test_summary_by_hand(self) -> None:
        def stages(old: float, update: float) -> dict[str, list[float]]:
            return {"old_log_probs": [old], "saliency": [], "weights": [0.5], "update": [update]}

        repeats = [
            {"GRPO": stages(1.5, 6.0), "GRAIL official, fused": stages(2.3, 6.0)},
            {"GRPO": stages(3.5, 6.0), "GRAIL official, fused": stages(3.5, 6.0)},
        ]
        found = engine.summary({"setup": {}, "runs": [{"repeats": repeats, "peak_bytes": {"x": 1}}]})
        grail = found["variants"]["GRAIL official, fused"]
        assert (grail["seconds"], grail["ratio"]) == (pytest.approx(9.4), pytest.approx(1.05))
        assert grail["ratios"] == [pytest.approx(1.1), 1.0]
        assert found["peak_bytes"] == {"x": 1}

    @pytest.mark.parametrize(("gibibytes", "words"), [(141, 0), (79, 0), (24, 12)])
    def test_a_small_gpu_gets_the_smaller_shape(
        self, monkeypatch: pytest.MonkeyPatch, gibibytes: int, words: int
    ) -> None:
        properties = SimpleNamespace(total_memory=gibibytes * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        options = engine.shape_options()
        assert len(options) == words
        if words:
            assert options[:4] == ["--layers", "28", "--hidden", "1024"]

    @pytest.mark.slow
    def test_tests_of_the_suite_become_checks(self, tmp_path: Path) -> None:
        (tmp_path / "test_three.py").write_text(
            "import pytest\n"
            "def test_right(): pass\n"
            "def test_wrong(): assert 1 == 2, 'not so'\n"
            "@pytest.mark.skip(reason='needs two')\n"
            "def test_left_out(): pass\n"
        )
        found = outcome(tmp_path)
        run_tests(found, [str(tmp_path / "test_three.py")])
        said = {check["name"]: (check["status"], check["said"]) for check in found.result["checks"]}
        assert said["test_three: test_left_out"] == (NOT_RUN, "needs two")
        assert said["test_three: test_right"][0] == PASSED
        assert said["test_three: test_wrong"][0] == FAILED and "not so" in said["test_three: test_wrong"][1]
        assert len(said) == 3

        found = outcome(tmp_path)
        run_tests(found, [str(tmp_path / "test_missing.py")])
        assert [check["status"] for check in found.result["checks"]] == [FAILED]

    @pytest.mark.slow
    def test_training_side_at_toy_size(self, tmp_path: Path) -> None:
        options = "--layers 2 --hidden 32 --intermediate 64 --heads 2 --kv-heads 1 --head-dim 16 --vocabulary 256"
        options += " --rows 4 --tokens 120 --prompt 4 --micro-batch-rows 2"
        found = outcome(tmp_path)
        engine.training_side(found, "cpu", options.split())
        assert statuses(found.result)["training side of a step: the benchmark runs"] == PASSED
        assert {"GRAIL's step against GRPO's", "GRAIL's pass needs no more memory than the update"} < set(
            statuses(found.result)
        )
        parts.write(tmp_path / "b.json", {**found.result, "status": PASSED})
        assert "| published procedure |" in page.render(tmp_path)
        found = outcome(tmp_path)
        engine.training_side(found, "cpu", ["--rows", "none"])
        [check] = found.result["checks"]
        assert check["status"] == FAILED and "invalid int value: 'none'" in check["said"]


class TestSmoke:
    CLAIMS = (
        {"what": "2 steps were trained", "proved": True, "figure": "2 in metrics.jsonl"},
        {"what": "the loss is a number", "proved": False, "figure": "0.1, nan"},
    )

    @pytest.fixture
    def left_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Stands for the script: leaves the given claims, and ends with the given status."""
        for knob in ("SCRIPT", "ADV_ESTIMATOR", "DRY_RUN", "PYTHON"):
            monkeypatch.setenv(knob, "to be put back")
        folder = tmp_path / "run"

        def make(code: int, claims: tuple[dict[str, Any], ...]) -> Path:
            def script(command: list[str]) -> tuple[int, str]:
                assert command == ["bash", smoke.SCRIPT] and (ROOT / smoke.SCRIPT).is_file()
                assert "ADV_ESTIMATOR" not in os.environ and os.environ["PYTHON"] == sys.executable
                (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
                if claims:
                    (folder / "smoke.json").write_text(json.dumps(claims))
                steps = [{"step": step, "data": {"timing_s/step": step / 3, "other": 1.0}} for step in (1, 2)]
                (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
                return code, "no luck\n\n"

            monkeypatch.setattr(smoke, "run_command", script)
            return folder

        return make

    def test_claims_become_checks(self, tmp_path: Path, left_behind: Any) -> None:
        found = outcome(tmp_path)
        folder = left_behind(1, self.CLAIMS)
        smoke.run(found, folder=folder)
        assert statuses(found.result) == {
            "2 steps were trained": PASSED,
            "the loss is a number": FAILED,
            "the smoke run proves everything": FAILED,
        }
        assert found.result["checks"][2]["said"] == "exit status 1: no luck"
        assert found.result["figures"]["smoke run"] == {"timing_s/step": 0.6667}
        assert not (folder / "checkpoints").exists()
        parts.write(tmp_path / "a.json", {**found.result, "status": FAILED})
        assert "| timing_s/step | 0.6667 |" in page.render(tmp_path)


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
