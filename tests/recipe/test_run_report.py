"""The line a step and the closing table, from a metrics file with known figures."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.run_report import METRICS_FILE, Step, read_steps, summary

RECORDS = [
    {"step": 0, "data": {"val-core/sums/acc/mean@1": 0.25}},
    {"step": 1, "data": {"critic/score/mean": 0.2, "timing_s/step": 3.0, "grail/selected_rate": 0.5}},
    {
        "step": 2,
        "data": {
            "critic/score/mean": 0.4,
            "timing_s/step": 5.0,
            "grail/selected_rate": 0.25,
            "val-core/sums/acc/mean@1": 0.5,
            "val-aux/sums/score/mean@1": 0.9,
        },
    },
]


def _write(folder: Path, records: list[dict], tail: str = "") -> Path:
    (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def test_a_line_and_a_file_are_read(tmp_path: Path) -> None:
    assert Step.parse(json.dumps(RECORDS[2])) == Step(2, accuracy=0.5, reward=0.4, seconds=5.0, selected=0.25)
    assert Step.parse(json.dumps(RECORDS[0])) == Step(0, accuracy=0.25, reward=None, seconds=None, selected=None)
    line = json.dumps({"step": 3, "data": {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@4": 0.75}})
    assert Step.parse(line).accuracy == 0.625, "the mean over data sources"
    assert read_steps(tmp_path) == []
    written = _write(tmp_path, RECORDS, tail='{"step": 3, "da')
    assert [step.number for step in read_steps(written)] == [0, 1, 2], "a line that is being written waits"


def test_summary_states_the_figures(tmp_path: Path) -> None:
    text = summary(_write(tmp_path, RECORDS), "a title")
    rows = [line.split("  ") for line in text.splitlines()]
    values = {row[1].strip(): row[-1].strip() for row in rows if len(row) > 2}
    wanted = {
        "training steps": "2",
        "held-out accuracy at step 0": "0.250",
        "held-out accuracy at step 2": "0.500",
        "change, points": "+25.0",
        "reward, first step": "0.200",
        "reward, mean of the last 2 steps": "0.300",
        "seconds a step, median": "4.0",
        "responses with token scores, mean": "37.5%",
    }
    assert text.startswith("a title\n") and {name: values[name] for name in wanted} == wanted
    assert str(tmp_path / "tensorboard") in text
