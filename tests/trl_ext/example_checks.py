"""``examples/trl_grail.py`` on a CPU with a tiny model; run by test_trl.py with TRL on the path.

``--bf16``, with which come bfloat16 and gradient checkpointing, is what the example takes by itself on a GPU alone.
"""

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from trl import GRPOConfig

from examples import five_arms
from examples.trl_published import problems
from grail_advantage.view.page import write_report
from grail_advantage.view.run import open_run
from recipe.data.specs import PUBLISHED_SUFFIX
from recipe.published import TRAINER, trl_arguments
from tests.documentation import files
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import Problem

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "trl_grail.py")
TEXTS = (
    "7+5-3+2",
    "1+8-4-2",
    "9-3+6+5",
    "4+4+4-7",
    "2+9-1+3",
    "8-5+7-6",
    "3+3+9-2",
    "6+1+5-8",
)
GOLD = {chain.text: str(chain.answer) for chain in map(Problem.parse, TEXTS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the model of the CPU example and a file of problems."""
    folder = tmp_path_factory.mktemp("example")
    for part in load_shipped():
        part.save_pretrained(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "solution": gold,
            "reward_model": {"ground_truth": gold},
        }
        for text, gold in GOLD.items()
    ]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def run_here(folder: Path, program: str, arguments: Sequence[str]):
    """Run a file or a module, in a process of its own."""
    os.chdir(folder)
    sys.argv = [program, *arguments]
    # The precision of the trainers before.
    AcceleratorState._reset_state(reset_partial_state=True)
    with open("log.txt", "w") as log, redirect_stdout(log), redirect_stderr(log):
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


def run(folder: Path, program: str, *arguments: str, succeeds: bool = True) -> str:
    """The output of a program that is started in another folder: a fork, as importing TRL takes longer than most runs."""
    process = multiprocessing.get_context("fork").Process(
        target=run_here, args=(folder, program, arguments)
    )
    process.start()
    process.join(900)
    output = (folder / "log.txt").read_text()
    assert (process.exitcode == 0) == succeeds, output[-3000:]
    return output


def test_a_run_with_lora_its_dump_and_its_report(folder):
    # Small enough for a CPU: 32 responses an update.
    options = "--model model --data problems.jsonl --held-out problems.jsonl --output out --lora-rank 4 --bf16"
    options += " --prompts 8 --rollouts 4 --micro-batch 32 --max-response 64 --dump-every 1 --steps 2"
    output = run(folder, EXAMPLE, *options.split())
    assert output.rstrip().endswith("python -m grail_advantage.report out")
    report = open_run(folder / "out")
    rows = list(report.dump)
    metrics = report.metrics
    assert [row.step for row in rows] == [1] * 32 + [2] * 32
    for row in rows:
        (gold,) = [gold for text, gold in GOLD.items() if text in row.prompt]
        assert row.ground_truth == gold and (row.reward == 1.0) == (row.answer == gold) == (
            row.outcome == "right"
        )
    # GRAIL scores responses with another answer than the ground truth.
    scored = [row for row in rows if row.no_scores is None]
    assert scored and all(
        row.outcome == "wrong" and row.weight_T.std() > 0.1 for row in scored
    )
    assert 0 < metrics["reward"][1] < 1 and 0 in metrics["eval_reward"]
    assert (folder / "out/adapter_model.safetensors").exists()
    settings = torch.load(folder / "out" / "training_args.bin", weights_only=False)
    assert settings.bf16 and settings.gradient_checkpointing and not settings.fp16
    assert settings.model_init_kwargs == {"dtype": "bfloat16"}  # of what is frozen
    assert write_report(folder / "out").stat().st_size > 50_000


def test_the_pages_script_and_its_completions(folder):
    """As it stands, but for model, data and size; ``analyze`` reads TRL's table of completions, whose rewards it has."""
    rows = [{"question": text, "answer": f"so\n#### {gold}"} for text, gold in GOLD.items()]
    (folder / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = files("trl.md")["grail.py"]
    for text, replacement in (
        ("Qwen/Qwen3-0.6B", "model"),
        ('"openai/gsm8k", "main", split', '"json", data_files="gsm8k.jsonl", split'),
        (
            "max_completion_length=1024,",
            "max_completion_length=48, log_completions=True, max_steps=1, use_cpu=True, bf16=False,",
        ),
        ("your final answer within", "it into"),
        ('"out', '"page'),
    ):
        assert text in script
        script = script.replace(text, replacement)
    (folder / "script.py").write_text(script)
    run(folder, "script.py")
    # TRL writes a table a step.
    (table,) = (folder / "page" / "completions").glob("*.parquet")
    options = "--model model --method grail --out seen"
    run(folder, "grail_advantage.analyze", str(table), *options.split())
    dumped, seen = (
        sorted((row.prompt, row.reward) for row in open_run(folder / name).dump)
        for name in ("page", "seen")
    )
    assert seen == dumped


def test_the_tiny_run_needs_no_model_and_no_data(tmp_path):
    """Killed while checkpoint 2 was saved, of which ``trainer_state.json`` is the last file, it resumes from checkpoint 1."""
    sizes = "--save-steps 1 --prompts 8 --rollouts 4 --micro-batch 32 --eval-every 9"
    command = [EXAMPLE, "--tiny", "--method", "uniform", *sizes.split()]
    for steps, options in ((2, []), (3, ["--resume"])):
        output = run(tmp_path, *command, "--steps", str(steps), *options)
        assert "Share of held-out problems answered correctly: 0." in output
        state = tmp_path / f"outputs/trl_tiny_uniform/checkpoint-{steps}/trainer_state.json"
        history = json.loads(state.read_text())["log_history"]
        trained = [entry["step"] for entry in history if "loss" in entry]
        assert trained == list(range(1, steps + 1))
        if steps == 2:
            # As of a process that was killed while it saved.
            state.unlink()
    # A run is there; a run is resumed with another seed.
    for options in ([], ["--resume", "--seed", "1"]):
        run(tmp_path, *command, *options, succeeds=False)
    assert json.loads(state.read_text())["log_history"] == history, "nothing is replaced"


def test_five_arms_run_once_each_and_uniform_is_stock(tmp_path, monkeypatch, capsys):
    """In the plan's order; of a second start, the run that had not ended. The two train to the same bits."""
    monkeypatch.chdir(tmp_path)
    sizes = {
        "TASKS": {"sums": five_arms.Task(64, ["1e-3"])},
        "HELD_OUT": 2,
        "SIZE": five_arms.SIZE.replace("--prompts 8", "--prompts 1").replace(
            "--steps 16", "--steps 1"
        ),
        "EVALUATION": "--eval-every 1 --dump-every 1 --effect-every 1",
    }
    for name, value in sizes.items():
        monkeypatch.setattr(five_arms, name, value)
    five_arms.main(["sums", "--seeds", "1"])
    folders = [run.folder for run in five_arms.planned("sums", five_arms.FIVE, 1, rate="")]
    # Two of the sweep, and the five of seed 0
    assert [folder.parent.name for folder in folders] == [
        "uniform",
        "grail",
        *five_arms.FIVE,
    ]
    models = [(folder / "model.safetensors").read_bytes() for folder in folders[2:]]
    assert models[0] == models[-1] and len(set(models)) == 4
    ended = [folder / "trainer_state.json" for folder in folders]
    # The fourth run had not ended.
    ended[3].unlink()
    times = [(folder / "options.json").stat().st_mtime_ns for folder in folders]
    five_arms.main(["sums", "--seeds", "1"])
    later = [(folder / "options.json").stat().st_mtime_ns for folder in folders]
    assert [time != old for time, old in zip(later, times, strict=True)] == [
        file == ended[3] for file in ended
    ]
    capsys.readouterr()
    five_arms.main(["sums", "--seeds", "1", "--arms", "grail", "stock", "--effects"])
    *parts, everything = [
        line.split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| grail")
    ]
    # Of the tokens and of the change the parts by probability have all, but for two digits' rounding.
    for column in (2, 3):
        assert abs(sum(float(part[column]) for part in parts) - 1) < 0.03
    # The rate over all tokens is that of the parts, each by its share.
    rates = [float(part[2]) * float(part[4]) for part in parts]
    assert abs(sum(rates) - float(everything[4])) < 0.03
    # What a forward rounds, less in float32 than in bfloat16
    assert all(0 <= float(part[6]) <= float(part[7].rstrip(" |")) for part in parts)
    assert all(float(part[6]) < 1e-4 for part in parts)


def test_a_run_with_the_published_arguments(folder):
    """What TRL trains with is the table, but for what a CPU lacks; the prompts end as published, with U+0008. Defaults
    of the table are TRL's."""
    overrides = {
        "use_vllm": False,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        "max_steps": 1,
        "max_completion_length": 8,
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1,
    }
    # What a CPU lacks, and small sizes.
    changes = [
        f"--set={name}={json.dumps(value)}"
        for name, value in (overrides | {"model_init_kwargs": {}}).items()
    ]
    arguments = ["--model", "model", "--output", "published", "--data", "problems.jsonl"]
    run(folder, "examples.trl_published", *arguments, *changes)
    settings = torch.load(folder / "published/training_args.bin", weights_only=False)
    for name, value in trl_arguments().items():
        assert getattr(settings, name) == {"scale_rewards": "none"}.get(
            name, overrides.get(name, value)
        ), name
    questions = [
        row["prompt"][0]["content"] for row in problems(str(folder / "problems.jsonl"))
    ]
    assert questions == [text + PUBLISHED_SUFFIX for text in GOLD]
    defaults = GRPOConfig("out", use_cpu=True)
    named = {row.name: row.theirs for row in TRAINER if row.place.startswith("TRL")}
    assert len(named) == 4 and {name: getattr(defaults, name) for name in named} == named
