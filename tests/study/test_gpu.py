"""The study's script for a GPU, and the control that it installs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grail_advantage import registry
from grail_advantage.batch import RolloutBatch
from grail_advantage.methods import method
from recipe.data.specs import BENCHMARKS
from study import gpu
from study.plan import CONTRASTS, StudyPlan

ROOT = Path(__file__).parents[2]
RATES = dict.fromkeys(gpu.ARMS, "1e-6")


def test_arms_and_outcome_are_the_plans() -> None:
    assert set(gpu.ARMS) == {arm for pair in CONTRASTS for arm in pair}
    assert (StudyPlan().run.temperature, StudyPlan().run.samples) == (gpu.TEMPERATURE, gpu.SAMPLES)


def test_tuning_comes_first_and_costs_what_the_sizing_says() -> None:
    sizing = gpu.sizing()
    setup = sizing.choose(sizing.MODELS["qwen3-1.7b"], 2, 80)
    text = gpu.script("qwen3-1.7b", gpus=2, memory=80)
    runs = [line for line in text.splitlines() if line.startswith("ADV_ESTIMATOR")]
    assert len(runs) == 3 * 4 and len(set(runs)) == 12
    assert all("bash examples/run_one_gpu_grail.sh" in line and "NGPUS_PER_NODE=2" in line for line in runs)
    hours = sizing.hours(sizing.MODELS["qwen3-1.7b"], setup)
    assert f"{12 * 2 * hours:.0f} GPU-hours" in text and "Not run on a GPU yet" in text
    assert "--compare" not in text and subprocess.run(["bash", "-n"], input=text, text=True, check=True).returncode == 0


def test_main_runs_pair_arms_by_seed() -> None:
    text = gpu.script("Qwen/Qwen3-4B", gpus=8, memory=80, seeds=2, rates={**RATES, "grail": "5e-7"})
    experiments = re.findall(r"EXPERIMENT_NAME=(\S+)", text)
    assert len(experiments) == 2 * 4 and "Qwen3-4B-grail-rate5e-7-seed2" in experiments
    compared = re.findall(r"--compare (\S+) (\S+)", text)
    assert len(compared) == 2 * len(CONTRASTS)
    for first, second in compared:
        assert first.rsplit("-seed", 1)[1] == second.rsplit("-seed", 1)[1]
        assert {Path(first).name, Path(second).name} <= set(experiments)
    assert {(second.split("-")[2], first.split("-")[2]) for first, second in compared} == set(CONTRASTS)
    options = set(re.findall(r"(--[a-z-]+)", "\n".join(line for line in text.splitlines() if "evaluate.sh" in line)))
    known = (ROOT / "recipe" / "evaluate" / "__main__.py").read_text(encoding="utf-8")
    assert all(f'"{option}"' in known for option in options)
    assert {*gpu.BENCHMARKS.split(","), gpu.TUNING_BENCHMARK} <= set(BENCHMARKS)
    assert gpu.TUNING_BENCHMARK not in gpu.BENCHMARKS and gpu.TUNING_BENCHMARK not in text


def test_the_page_says_what_the_sizing_says() -> None:
    page = (ROOT / "docs" / "study2" / "real_model.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (qwen3\S+) \| (\d+) x (\d+) GB \| ([\d.]+) \| (\d+) \| (\d+) \|", page)
    assert len(rows) == 4
    for model, gpus, memory, hours, *costs in rows:
        for rates, cost in zip((None, RATES), costs, strict=True):
            text = gpu.script(model, gpus=int(gpus), memory=int(memory), rates=rates)
            assert f"Estimated: {hours} h a run, {cost} GPU-hours" in text


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="--model=gpt2 has no launch script"):
        gpu.script("gpt2", gpus=1, memory=80)
    with pytest.raises(ValueError, match="does not fit on 1 x 1 GPUs of 24 GB"):
        gpu.script("qwen3-8b", gpus=1, memory=24)
    with pytest.raises(ValueError, match="--rates wants ARM=RATE for each of uniform"):
        gpu.script("qwen3-1.7b", gpus=1, memory=80, rates={"uniform": "1e-6"})
    with pytest.raises(ValueError, match="--rates wants"):
        gpu.parse_rates(["uniform"])
    assert gpu.parse_rates([]) is None


def test_the_control_picks_one_random_reasoning_token_of_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_signals", registry.signals())
    monkeypatch.syspath_prepend(ROOT / "study" / "random_token")
    module = importlib.import_module("random_token")
    monkeypatch.delitem(sys.modules, "random_token")
    signal = method("random_token").build({})
    assert (signal.gate, signal.reshaper) == ("wrong", "top")

    def scores(seed: int) -> torch.Tensor:
        column = -torch.rand(3, 40, generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(3, 40, dtype=torch.bool)
        batch = RolloutBatch(mask, torch.tensor([1.0, -1.0, -1.0]), [None] * 3, {"old_log_probs": column})
        return signal.scores(batch, None)

    assert torch.equal(scores(0), scores(0))
    assert not torch.equal(scores(0).argmax(1), scores(1).argmax(1))
    assert module.RandomTokenConfig.section == "random_token"
