"""The GPU check without a GPU: its parts at toy size on the CPU, what it makes of failures, and its figures by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import benchmarks.gpu_check.__main__ as command
from benchmarks.gpu_check import engine, plain, trl_runs
from benchmarks.gpu_check import outcome as outcomes
from benchmarks.gpu_check.__main__ import PARTS, ROOT
from benchmarks.gpu_check.outcome import FAILED, PASSED, Outcome
from benchmarks.made_up import SHAPES, random_model
from benchmarks.timer import RESULTS
from grail_advantage import Grail
from recipe.marked_text import marked
from scripts import sizing
from tests.core.common import some
from verl_cpu.tiny.task import Problem, random_problems

RECORD = {"name": "a: part", "versions": {}, "command": "", "date": "", "hardware": ""}


def outcome(folder: Path) -> Outcome:
    return Outcome(folder, RECORD)


def statuses(found: Outcome) -> list[str]:
    return [check["status"] for check in found.result["checks"]]


def run_part(letter: str, results: Path) -> dict[str, Any]:
    """The result of a part at toy size, by its command."""
    line = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--dry", letter, "--results", str(results)]
    done = subprocess.run(line, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    result = json.loads((results / f"{letter}.json").read_text())
    if "lacks" in done.stdout:
        pytest.skip(done.stdout[done.stdout.index("lacks") :])
    assert done.returncode == 0 and result["status"] == PASSED, done.stdout + done.stderr
    assert f"`bash scripts/gpu_check.sh --dry {letter}`" in (results / f"{letter}.md").read_text()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("letter", some(PARTS, ("a",)))
def test_a_part_at_toy_size(tmp_path: Path, letter: str) -> None:
    result = run_part(letter, tmp_path)
    tables = {name: of["rows"] for name, of in result["figures"].items()}
    if letter == "a":
        assert set(tables["Precision, toy, random"]) == set(plain.METHODS)
        assert all(row["above the parameters"] > 0 for row in tables["Passes, toy"].values())
    elif letter == "c":
        peaks = tables["Peak memory, toy, 4 at once"]
        parameters = 2 * 512 * 32 + 2 * (32 * (64 + 32 + 32 + 64) + 3 * 32 * 64 + 2 * 32 + 2 * 32) + 32
        state = 3 * 4 * parameters / 2**30  # float32 parameters and Adam's two moments
        assert all(row["GiB"] > state for row in peaks.values())
        assert {len(row["4 epochs, x GRPO"]) for row in tables["Training side, toy, 1 at once"].values()} == {1}
        assert tables["One forward, toy, 1 at once"]["verl's old log-probabilities"]["seconds a response"] > 0
    else:
        assert [set(tables[f"Run of {method}, by step"]) for method in trl_runs.METHODS] == [{"0", "1", "2"}] * 2
        assert tables["Price"]["grail"]["of them for the weights"] > 0
        assert letter == "b" or set(tables["Precision, SmolLM2-135M on worked sums"]) == set(plain.JUDGED)
    if letter == "b":
        before, after = (load_file(trl_runs.RUNS / "b" / run / "model.safetensors") for run in ("model", "grail"))
        assert after.keys() == before.keys() and {value.dtype for value in after.values()} == {torch.float32}
        assert not any(value.equal(before[name].float()) for name, value in after.items()), "all parameters are trained"


@pytest.mark.parametrize(("size", "steps"), [(768, (3, 6)), (1000, (2, 2))])
def test_problems_are_those_of_the_task_and_held_out_ones_are_others(size: int, steps: tuple[int, int]) -> None:
    made = random_problems(size, steps=steps)
    assert made == random_problems(size, steps=steps) and len({chain.text for chain in made}) == size
    for chain in made:
        assert steps[0] <= len(chain.steps) <= steps[1] and all(0 <= value <= 19 for value in chain.values)
        assert eval(chain.text) == chain.answer and Problem.parse(chain.text) == chain


def test_differences_by_hand() -> None:
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
    assert (got["mean"], got["largest"]) == (pytest.approx(0.3), 1.0)
    assert got["rank correlation of the scores"] == pytest.approx(0.75)


def test_weights_that_differ_and_that_bfloat16_does_not_keep_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another method at every other call, or once the parameters are bfloat16, as a faulty kernel might give them."""
    size, right, calls = plain.TOY, plain.weights, iter(range(100))
    rollouts = plain.incorrect(*size.weighed, size.prompt, "toy")
    for faulty in (False, True):
        found, model = outcome(tmp_path), random_model(SHAPES["toy"], "cpu", torch.float32)

        def weights(model: Any, signal: Any, rollouts: Any, faulty: bool = faulty) -> Any:
            wrong = faulty and next(model.parameters()).dtype == torch.bfloat16
            return right(model, plain.METHODS["oar_g, official"] if wrong else signal, rollouts)

        monkeypatch.setattr(plain, "weights", weights)
        plain.precision(found, "toy", model, rollouts, plain.JUDGED)
        assert set(statuses(found)) == {FAILED if faulty else PASSED}

    other = Grail("robust", statistics="response", gate="wrong", normalize_mass=False)
    monkeypatch.setattr(
        plain, "weights", lambda model, signal, of: right(model, signal if next(calls) % 2 else other, of)
    )
    found = outcome(tmp_path)
    plain.against_cpu(found, "cpu", size)
    assert set(statuses(found)) == {FAILED}


def test_failures_stop_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A group that raises, a part that raises, one that passes, one that lacks a package; one that dies keeps what it had."""
    body = """
def run(outcome, device):
    with outcome.attempt("first"):
        raise ValueError("it broke")
    outcome.check("then", True, "yes")
    {end}
"""
    ends = {"raises": "raise KeyError(3)", "lacks": "import no_such_module", "dies": "raise SystemExit(3)"}
    for name, end in ends.items():
        (tmp_path / f"{name}.py").write_text(body.format(end=end))
    (tmp_path / "passes.py").write_text("def run(outcome, device):\n    outcome.check('holds', True, 'yes')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command, "PARTS", {name[0]: ("", name, "run", "") for name in (*ends, "passes")})
    for letter, status, said in (
        (
            "r",
            1,
            "   failed: first (ValueError: it broke)\n   passed: then (yes)\n   failed: the part as a whole (KeyError: 3)",
        ),
        ("p", 0, "p: passed"),
        ("l", 1, "not run: the part as a whole"),
    ):
        assert command.main([letter, "--dry", "--results", str(tmp_path)]) == status
        assert said in capsys.readouterr().out
    assert "lacks no_such_module" in (tmp_path / "l.md").read_text()
    with pytest.raises(SystemExit):
        command.main(["d", "--dry", "--results", str(tmp_path)])
    kept = json.loads((tmp_path / "d.json").read_text())
    assert kept["status"] == outcomes.UNFINISHED and [check["name"] for check in kept["checks"]] == ["first", "then"]


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["a"]) == 1
    assert "sees no GPU on this machine: nothing was checked" in capsys.readouterr().out


def test_a_part_that_lacks_packages_names_them_before_it_imports_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    title, _, function, packages = PARTS["c"]
    part = {"c": (title, "no_such_module", function, f"no_such_b {packages} no_such_a")}
    monkeypatch.setattr(command, "PARTS", part)
    assert command.main(["c", "--dry", "--results", str(tmp_path)]) == 1
    assert "lacks no_such_b, no_such_a" in capsys.readouterr().out


def test_a_clone_that_is_not_installed_has_its_plug_ins(tmp_path: Path) -> None:
    """An interpreter without any installed package, and a clone without what an installation leaves there."""
    for name in ("scripts", "benchmarks", "grail_advantage", "recipe", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "packages/verl-cpu").mkdir(parents=True)
    for name in ("verl_cpu", "pyproject.toml"):
        (tmp_path / "packages/verl-cpu" / name).symlink_to(ROOT / "packages/verl-cpu" / name)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    line = ["bash", str(tmp_path / "scripts/gpu_check.sh"), "--dry", "a", "--results", str(tmp_path)]
    done = subprocess.run(line, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'torch'" in done.stdout
    found = distributions(name=None, path=[str(tmp_path / "entry_points")])
    points = {point.name: point.value for of in found for point in of.entry_points.select(group="verl.plugins")}
    assert points == {"grail_advantage": "grail_advantage.verl_ext.plugin", "verl_cpu": "verl_cpu.plugin"}


def test_the_callers_path_reaches_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" > {tmp_path}/path\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", "/packages/of/the/caller")
    trl_runs.run_example(outcome(tmp_path), "grail", {}, tmp_path)
    assert (tmp_path / "path").read_text().strip().split(os.pathsep)[-1] == "/packages/of/the/caller"


def test_without_flash_attn_two_million_bfloat16_rows_go_through_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name under which verl's engine calls it; verl's own way, a call and a backward a row, would take minutes."""
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    spec = importlib.util.spec_from_file_location("as_released", torch_functional.__file__)
    released = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(released)
    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", released.logprobs_from_logits_v2)
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    assert engine.log_probs_in_chunks().endswith("log_probabilities_in_few_calls")
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(2_000_000, 16, generator=generator).bfloat16().requires_grad_()
    labels_N = torch.randint(16, (2_000_000,), generator=generator)
    calls, log_softmax = [], torch.nn.functional.log_softmax
    monkeypatch.setattr(torch.nn.functional, "log_softmax", lambda *of, **by: calls.append(1) or log_softmax(*of, **by))
    log_probs_N = transformer_impl.logprobs_from_logits(logits_NV, labels_N)
    log_probs_N.sum().backward()
    assert 1 < len(calls) <= 20
    first = logits_NV[:100].detach().requires_grad_()
    expected_N = released.logprobs_from_logits_v2(first, labels_N[:100])
    expected_N.sum().backward()
    assert log_probs_N[:100].equal(expected_N) and logits_NV.grad[:100].equal(first.grad)


def test_responses_and_repeats_follow_from_one_forward_by_hand() -> None:
    """Beside the repeats the shape takes 23 forwards over the batch, and each repeat 27."""
    assert engine.affordable(50, 0.05) == (8, 3)  # 1000 forwards of one response: 125 of eight, 102 for repeats of 27
    assert engine.affordable(50, 0.001) == (8, 6)
    assert engine.affordable(40, 0.13) == (4, 1)  # 307: too few for eight, 50 a response
    assert engine.affordable(5, 1) == (4, 1), "there always is one"


def test_the_limits_of_bfloat16_by_hand() -> None:
    of = {"mean": 0.0164, "the weights' own deviation": 0.475, "rank correlation of the scores": 0.9986}
    assert plain.kept(of)[0] and "3.5%" in plain.kept(of)[1]
    assert not plain.kept(of | {"mean": 0.0194})[0], "4.1 % of the deviation"
    assert not plain.kept(of | {"rank correlation of the scores": 0.99})[0]


def test_the_page_of_gpus_shows_the_recorded_results(tmp_path: Path) -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert marked(page, "measured") == sizing.measured(RESULTS)
    recorded = json.loads((RESULTS / "gpu_check_a-h100_2026_11_27.json").read_text())
    recorded["figures"]["Passes, Qwen3-4B"]["rows"]["grail"] = {"peak, GiB": plain.OUT_OF_MEMORY}
    (tmp_path / "gpu_check_a-other.json").write_text(json.dumps(recorded))
    assert "| Qwen3-4B | grail |  |  | out of memory |" in sizing.measured(tmp_path)


@pytest.mark.slow
def test_part_a_needs_torch_transformers_and_pydantic_alone() -> None:
    others = (
        "verl",
        "tensordict",
        "omegaconf",
        "hydra",
        "pyarrow",
        "ray",
        "vllm",
        "math_verify",
        "pytest",
        "pandas",
        "datasets",
    )
    program = f"import sys, benchmarks.gpu_check.__main__, benchmarks.gpu_check.plain; print({{*{others}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_several_figures_are_a_median_with_its_interval() -> None:
    """The true median is between the lowest and the highest of four unless all four are on one side of it."""
    assert outcomes.cell([1.0, 2.0, 4.0, 9.0]) == "3 (1 to 9, 88%)"
