"""Runs of plain verl and TRL: their own files, in their own places, open in every command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from grail_advantage import report
from grail_advantage.dump import DumpHeader, write_step
from grail_advantage.view import receipt
from grail_advantage.view.page.data import open_run
from grail_advantage.view.places import find
from tests.dumps import dump_row, table_of
from tests.view.test_foreign import called, run_of

TRL = Path(__file__).parent / "trl_run"
"""Of a plain ``GRPOTrainer`` of TRL 1.16, three steps on the CPU example's model; the weights are taken away."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the training is started."""
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def verl_logs(project: str = "gsm8k", experiment: str = "grail", steps: int = 2) -> None:
    """By verl's own class, with figures as its trainer gives them."""
    import numpy as np
    from verl.utils.tracking import FileLogger

    logger = FileLogger(project, experiment)
    for step in range(steps + 1):
        values = {"critic/score/mean": np.float64(0.25 * step), "timing_s/step": 1.5, "val-core/gsm8k/acc/mean@1": 0.5}
        logger.log({**values, "actor/entropy": np.float32("nan")}, step)
    logger.finish()


def dump(folder: Path) -> None:
    write_step(folder, DumpHeader(step=1, method="grail"), table_of([dump_row([1.0])]))


def opens(run: Path | str, page: Path, *, said: str = "", steps: tuple[int, ...] = (0, 1, 2)) -> str:
    """The report's errors; the last line printed is the page's path."""
    status, out, err = called(report.main, run)
    assert (status, out) == (0, f"{page.resolve()}\n") and page.stat().st_size > 100_000 and said in err, err
    assert tuple(open_run(run).metrics) == steps
    status, out, _ = called(report.main, run, "--summary")
    assert status == 0 and ("critic/score/mean" in out or "reward" in out)
    return err


def test_verls_log_where_it_puts_it(here: Path) -> None:
    """RUN is the file, the experiment, the project, or where the training began; curves alone, and how to get the rest."""
    verl_logs()
    page = here / "gsm8k" / "grail" / "report.html"
    for run in (Path("gsm8k/grail.jsonl"), Path("gsm8k/grail"), Path("gsm8k"), Path("gsm8k/grail"), Path(), here):
        err = opens(run, page, said=f"+algorithm.token_dump.folder={here}/gsm8k/grail/tokens")
        assert err.count("\n") == 1
        page.unlink()
        status, out, err = called(receipt.main, run)
        assert (status, out, err.count("\n")) == (2, "", 1) and "+algorithm.token_dump.folder=" in err
        status, out, err = called(report.main, run, "--terminal")
        assert (status, out, err.count("\n")) == (1, "", 1) and "+algorithm.token_dump.folder=" in err


@pytest.mark.parametrize("folder", ["gsm8k/grail/tokens", "checkpoints/gsm8k/grail/tokens"])
def test_a_dump_beside_verls_log_or_its_checkpoints(here: Path, folder: str) -> None:
    """As a run's command may name them."""
    verl_logs()
    dump(here / folder)
    (here / "checkpoints/gsm8k/grail/global_step_2/actor").mkdir(parents=True)
    run = Path(folder).parent
    assert opens(run, run / "report.html") == ""
    for file in (Path("gsm8k/grail.jsonl"), run, Path("checkpoints/gsm8k/grail")):
        assert len(list(open_run(file).dump)) == 1 and len(open_run(file).metrics) == 3


def test_the_logger_by_its_variables(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "checkpoints")
    verl_logs()
    (here / "checkpoints/gsm8k/grail/global_step_2").mkdir(parents=True)
    opens("checkpoints/gsm8k/grail", here / "checkpoints/gsm8k/grail/report.html")
    opens("checkpoints/gsm8k", here / "checkpoints/gsm8k/grail/report.html")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(here / "a.jsonl"))
    verl_logs()
    opens("a.jsonl", here / "a/report.html")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(here / "a/metrics.jsonl"))
    verl_logs()
    err = opens("a", here / "a/report.html")
    assert "the curves are those of a/metrics.jsonl; not taken: " in err and "a.jsonl" in err


def test_several_runs_are_listed_and_two_are_compared(here: Path) -> None:
    verl_logs("gsm8k", "grail")
    verl_logs("gsm8k", "uniform", steps=5)
    for run in (here, here / "gsm8k"):
        status, out, err = called(report.main, run)
        assert (status, out) == (1, "") and f"{run / 'gsm8k' if run == here else run}/uniform" in err and "grail" in err
        assert called(receipt.main, run)[0] == 2
    status, out, _ = called(report.main, "gsm8k/grail", "--against", "gsm8k/uniform")
    assert status == 0 and out == f"{here}/gsm8k/grail/report_against_uniform.html\n"
    run_of(here / "other/run")
    assert called(report.main, "gsm8k/uniform.jsonl", "--against", "other")[0] == 0
    status, _, err = called(report.main, here / "gsm8k" / "nothing")
    assert status == 1 and "neither a folder nor a file" in err


def test_checkpoints_alone_have_no_curves(here: Path) -> None:
    (here / "checkpoints/gsm8k/grail/global_step_2/actor").mkdir(parents=True)
    for main, expected in ((report.main, 1), (receipt.main, 2)):
        status, out, err = called(main, "checkpoints/gsm8k/grail")
        assert (status, out, err.count("\n")) == (expected, "", 1)


def test_trl(here: Path) -> None:
    """``trainer_state.json`` of the latest checkpoint, of one checkpoint, and in the run's folder."""
    run = here / "out"
    shutil.copytree(TRL, run)
    assert sorted(os.listdir(run)) == ["checkpoint-2", "checkpoint-3", "completions"]
    history = json.loads((run / "checkpoint-3/trainer_state.json").read_text())["log_history"]
    for place in (run, run / "checkpoint-3/trainer_state.json", here):
        err = opens(place, run / "report.html", steps=(1, 2, 3), said=f"token_dump='{run.resolve()}/tokens'")
        assert err.count("\n") == 1 and "verl" not in err
        assert [values["reward"] for values in open_run(place).metrics.values()] == [
            entry["reward"] for entry in history if "reward" in entry
        ]
    assert list(open_run(run / "checkpoint-2").metrics) == [1, 2]
    assert called(receipt.main, run)[0] == 2
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history[:1]}))
    assert list(open_run(run).metrics) == [1]
    verl_logs()
    assert called(report.main, run, "--against", "gsm8k/grail")[0] == 0
    dump(run / "tokens")
    assert find(run).tokens == run / "tokens" and open_run(run).dump is not None


def test_links_and_many_folders_do_not_lead_astray(here: Path) -> None:
    verl_logs()
    (here / "gsm8k/round").symlink_to("..")
    (here / "hidden/.git").mkdir(parents=True)
    (here / "pipe.jsonl").symlink_to("/dev/zero")
    os.mkfifo(here / "gsm8k/pipe.jsonl")
    assert find(here).folder.resolve() == here / "gsm8k/grail"


def rows_of(run: Path) -> list[tuple]:
    opened = open_run(run)
    assert opened.dump is not None and opened.problems == [], opened.problems
    return [
        (row.step, row.group, row.prompt, row.response, row.ground_truth, row.reward, row.outcome)
        for row in opened.dump
    ]


def test_texts_of_verl(here: Path) -> None:
    """Its dumps of rollouts and of validation, written by its own function."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    verl_logs()
    texts = [" So \\boxed{2}.", "a\n\nb ", ""]
    for step in (1, 2):
        given = (
            ["What?", "What?", "Else?"],
            texts,
            ["2", "2", None],
            [1.0, -0.5, 0.0],
            {"uid": ["a_0_0", "a_1_0", "b_0_0"]},
        )
        PPOTrainer._write_generations(*given, "gsm8k/grail/rollouts", step)
    prompts = ["What?", "What?", "Else?"]
    expected = [
        (step, group, prompt, text, gold, reward, outcome)
        for step in (1, 2)
        for group, prompt, text, gold, reward, outcome in zip(
            (0, 0, 1), prompts, texts, ("2", "2", None), (1.0, -0.5, 0.0), ("right", "wrong", "wrong"), strict=True
        )
    ]
    for run in (Path("gsm8k/grail"), Path("gsm8k"), Path("gsm8k/grail/rollouts")):
        assert rows_of(run) == expected
        status, out, err = called(report.main, run)
        assert status == 0 and "texts alone" in err and "+algorithm.token_dump.folder=" in err and err.count("\n") == 1
    status, out, _ = called(report.main, "gsm8k/grail", "--terminal", "--step", "1")
    assert status == 0 and "So \\boxed{2}." in out
    shutil.copytree("gsm8k/grail/rollouts", "gsm8k/grail/validation")
    assert (
        "the responses are those of gsm8k/grail/rollouts; not taken: gsm8k/grail/validation"
        in called(report.main, "gsm8k/grail")[2]
    )
    dump(here / "gsm8k/grail/tokens")
    assert [row.key for row in open_run("gsm8k/grail").dump or ()] == ["a_0_0"]


def test_texts_of_trl(here: Path) -> None:
    shutil.copytree(TRL / "completions", here / "out/completions")
    rows = rows_of(here / "out")
    assert len(rows) == 16 and {row[0] for row in rows} == {1, 2}
    assert rows[8] == (2, 0, "7+5-3+2", "7+5=12;12-3=9;9+2=11;11+2=13;\\boxed{13}", None, 0.0, "wrong")
    first = next(iter(open_run(here / "out").dump or ()))
    assert first.advantage_T is not None and first.no_scores and (first.weight_T == 1).all()
    assert called(report.main, here / "out")[0] == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"input": 1, "output": "a", "score": 1}',
        b'{"input": "a", "output": [1], "score": 1}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("name", ["2.jsonl", "completions_00002.parquet"])
def test_a_damaged_file_of_texts_costs_itself(here: Path, name: str, content: bytes) -> None:
    good = {"input": "a", "output": "b c", "score": 10**400, "gts": {"a": ["\ud800"]}}
    (here / "run").mkdir()
    (here / "run/1.jsonl").write_text(json.dumps(good))
    (here / "run" / name).write_bytes(content)
    status, _, err = called(report.main, here / "run")
    naming = [line for line in err.splitlines() if name in line]
    assert status == 0 and len(naming) == (name != "2.jsonl" or content != b""), err
    (row,) = open_run(here / "run").dump or ()
    assert (row.tokens, row.reward, row.outcome) == (["b", " c"], None, None)
