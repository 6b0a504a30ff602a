"""The line a step and the closing table, from a metrics file with known figures."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.run_report import METRICS_FILE, summary

RECORDS = [
    {"step": 0, "data": {"val-core/sums/acc/mean@1": 0.25}},
    {"step": 1, "data": {"critic/score/mean": 0.2, "timing_s/step": 3.0, "grail/selected_rate": 0.5}},
    {
        "step": 2,
        "data": {"critic/score/mean": 0.4, "timing_s/step": 5.0, "grail/selected_rate": 0.25}
        | {"val-core/sums/acc/mean@1": 0.5, "val-aux/sums/score/mean@1": 0.9},
    },
]


def test_summary_states_the_figures(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    text = summary(tmp_path, "a title")
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
