"""``examples/trl_grail.py`` on a CPU with a tiny model; run by test_trl.py with TRL on the path.

``--bf16``, with which come bfloat16 and gradient checkpointing, is what the example takes by itself on a GPU alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOConfig

from examples import trl_grail
from examples.trl_published import problems
from grail_advantage.view.page import write_report
from grail_advantage.view.run import open_run
from recipe.data.specs import PUBLISHED_SUFFIX
from recipe.published import TRAINER, trl_arguments
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import Problem

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl_grail.py"
CHAINS = [
    Problem.parse(text)
    for text in ("7+5-3+2", "1+8-4-2", "9-3+6+5", "4+4+4-7", "2+9-1+3", "8-5+7-6", "3+3+9-2", "6+1+5-8")
]
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": chain.text}], "reward_model": {"ground_truth": str(chain.answer)}}
    for chain in CHAINS
]
SMALL = ["--prompts", "8", "--rollouts", "8", "--micro-batch", "64", "--max-response", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model of the CPU example and a file of problems."""
    folder = tmp_path_factory.mktemp("example")
    for part in load_shipped():
        part.save_pretrained(folder / "model")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "train.parquet")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def run(folder: Path, command: list[Any]) -> str:
    """The output of a program that is started in another folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_run_with_lora_its_dump_and_its_report(folder: Path) -> None:
    options = "--data train.parquet --held-out train.jsonl --dump-every 1 --lora-rank 4 --bf16 --steps 2"
    command = [EXAMPLE, "--model", "model", "--output", "out", *SMALL, *options.split(), "--learning-rate", "1e-3"]
    assert run(folder, command).rstrip().endswith("python -m grail_advantage.report out")
    found = open_run(folder / "out")
    rows, metrics = list(found.dump), dict(found.metrics)
    assert [row.step for row in rows] == [1] * 64 + [2] * 64
    solutions = {chain.text: str(chain.answer) for chain in CHAINS}
    for row in rows:
        (gold,) = [solution for text, solution in solutions.items() if text in row.prompt]
        assert row.ground_truth == gold and (row.reward == 1.0) == (row.answer == gold) == (row.outcome == "right")
    scored = [row for row in rows if row.no_scores is None]
    assert scored and all(row.outcome == "wrong" and row.weight_T.std() > 0.1 for row in scored)
    assert 0 < metrics["reward"][1] < 1 and 0 in metrics["eval_reward"]
    assert (folder / "out" / "adapter_model.safetensors").exists()
    settings = torch.load(folder / "out" / "training_args.bin", weights_only=False)
    assert settings.bf16 and settings.gradient_checkpointing and not settings.fp16
    assert settings.model_init_kwargs == {"dtype": "bfloat16"}  # of what is frozen
    assert write_report(folder / "out") == folder / "out" / "report.html"
    assert (folder / "out" / "report.html").stat().st_size > 100_000


def test_the_tiny_run_needs_no_model_and_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--steps 2 --save-steps 1 --prompts 2 --rollouts 4 --micro-batch 8 --eval-every 1"
    command = [EXAMPLE, "--tiny", "--method", "uniform", *sizes.split()]
    for more, last in (([], 2), (["--resume", "--steps", "3"], 3)):
        assert "Share of held-out problems answered correctly: 0." in run(tmp_path, [*command, *more])
        state = tmp_path / "outputs" / "trl_tiny_uniform" / f"checkpoint-{last}" / "trainer_state.json"
        history = json.loads(state.read_text())["log_history"]
        assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, last + 1))
    refused = {
        "which a new one would replace": [],
        "has no checkpoint to go on from": ["--resume", "--output", "elsewhere"],
        "leave out --model": ["--data", "none.jsonl"],
        "a multiple of --micro-batch 8": ["--prompts", "5"],
    }
    monkeypatch.chdir(tmp_path)
    for why, more in refused.items():  # in this process, which has imported TRL
        monkeypatch.setattr(sys, "argv", [*map(str, command), *more])
        with pytest.raises(SystemExit) as refusal:
            trl_grail.main()
        said = f"{refusal.value} {capsys.readouterr().err}"
        assert refusal.value.code and why in said.replace("\n", " ")
    assert json.loads(state.read_text())["log_history"] == history, "nothing is replaced"


def test_a_run_with_the_published_arguments(folder: Path) -> None:
    """What TRL trains with is the table, but for what a CPU lacks; the prompts end as published, with U+0008."""
    solved = [{"prompt": row["prompt"], "solution": row["reward_model"]["ground_truth"]} for row in ROWS]
    (folder / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solved))
    here = {"use_vllm": False, "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "optim": "adamw_torch"}
    here |= {"max_steps": 2, "max_completion_length": 8}
    here |= {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}
    changes = [f"--set={name}={json.dumps(value)}" for name, value in (here | {"model_init_kwargs": {}}).items()]
    given = ["--model", folder / "model", "--output", folder / "published", "--data", folder / "solutions.jsonl"]
    run(folder, ["-m", "examples.trl_published", *given, *changes])
    settings = torch.load(folder / "published" / "training_args.bin", weights_only=False)
    for name, value in trl_arguments().items():
        wanted = {"scale_rewards": "none"}.get(name, here.get(name, value))
        assert getattr(settings, name) == wanted, name
    for row, given in zip(problems(str(folder / "solutions.jsonl")), ROWS, strict=True):
        assert row["prompt"][0]["content"] == given["prompt"][0]["content"] + PUBLISHED_SUFFIX


def test_the_defaults_of_the_table_are_trls() -> None:
    """The authors' file leaves them at their trainer's, which is a copy of TRL's."""
    defaults = GRPOConfig("out", use_cpu=True)
    named = {row.name: row.theirs for row in TRAINER if row.place.startswith("TRL")}
    assert len(named) == 4 and {name: getattr(defaults, name) for name in named} == named
