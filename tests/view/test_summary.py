"""A run's metrics in the terminal, from a file with known figures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from grail_advantage.report import main
from grail_advantage.view.summary import follow, step_lines

ACCURACY = "val-core/sums/acc/mean@1"
STEPS: dict[int, dict[str, Any]] = {
    0: {ACCURACY: 0.25},
    1: {"critic/score/mean": 0.2, "timing_s/step": 3.0, "grail/selected_rate": 0.5},
    2: {
        "critic/score/mean": 0.4,
        "timing_s/step": 5.0,
        "grail/selected_rate": 0.25,
        ACCURACY: 0.5,
        "actor/entropy": None,
    },
}


def line(step: int, values: dict[str, Any]) -> str:
    return json.dumps({"step": step, "data": values}) + "\n"


def test_summary_states_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--summary"]) == 1
    assert "has no step yet" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("".join(line(*one) for one in STEPS.items()))
    assert main([str(tmp_path), "--summary"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{tmp_path}: 2 training steps, 4.0 s each (median)"
    assert head.split() == ["steps", "first", "last", "mean", "of", "10"]
    assert [row.split() for row in rows] == [
        [ACCURACY, "0", "to", "2", "0.250", "0.500", "0.375"],
        ["critic/score/mean", "1", "to", "2", "0.200", "0.400", "0.300"],
        ["grail/selected_rate", "1", "to", "2", "0.500", "0.250", "0.375"],
        ["actor/entropy", "2", "to", "2", "nan", "nan", "nan"],
    ]


def test_steps_are_shown_as_they_are_logged(tmp_path: Path) -> None:
    """Steps 0 and 1 are from before; the run makes step 1 again and then step 2, of which it writes half a line at first."""
    file, (half, rest) = tmp_path / "metrics.jsonl", (line(2, STEPS[2])[:30], line(2, STEPS[2])[30:])
    again = line(0, STEPS[0]) + line(1, {**STEPS[1], "timing_s/step": 4.0})
    file.write_text(line(0, STEPS[0]) + line(1, STEPS[1]))
    run = "import sys; sys.stdin.readline()"
    with subprocess.Popen([sys.executable, "-c", run], stdin=subprocess.PIPE, text=True) as process:
        shown = follow(tmp_path, process.pid)
        first_shown = step_lines(tmp_path)
        assert list(first_shown.values()) == [
            "step    0  held-out acc 0.250",
            "step    1  reward 0.200  3.0 s",
        ]
        # The generator reads the old steps when it is asked for the first new one.
        timer = threading.Timer(1, file.write_text, [again + half])
        timer.start()
        assert next(shown) == "step    1  reward 0.200  4.0 s"
        file.write_text(again + half + rest)
        process.communicate("\n")
        assert list(shown) == ["step    2  reward 0.400  held-out acc 0.500  5.0 s"]
