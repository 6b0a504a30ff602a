"""The soak's plan and figures, and that the pages of soak, kills and nodes are those of their records."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from benchmarks.endurance import kills, nodes, soak, soak_page
from recipe.marked_text import marked


@pytest.mark.parametrize("steps", [300, 1000])
def test_the_plan_strikes_every_place_once_between_two_checkpoints(steps: int) -> None:
    plan = soak.kill_plan(steps)
    assert tuple(place for _, place in plan) == soak.KILLED
    numbers = [step for step, _ in plan]
    assert all(step % soak.EVERY == soak.EVERY // 2 for step in numbers) and numbers[-1] < steps - soak.EVERY
    assert all(later - earlier >= 2 * soak.EVERY for earlier, later in itertools.pairwise(numbers))


def test_slope_and_its_error_are_those_of_least_squares_with_a_level_for_each_life() -> None:
    """Against numpy's solution of the whole system; first steps and the end of a life do not count."""
    generator, rows = np.random.default_rng(0), []
    lives = pd.DataFrame({"number": [1, 2], "resumed_from": [0, 30], "first_step_at": [0.0, 200.0]})
    lives = lives.assign(killed_at=[100.0, np.nan], ended=[101.0, 300.0])
    for life, first, level in ((1, 0, 100.0), (2, 30, 300.0)):
        for step in range(1, 95):
            value = level + 0.5 * step + generator.normal() - (50 if step <= soak_page.WARM_UP else 0)
            rows.append([200.0 * (life - 1) + step, life, first + step, "driver", value])
    memory = pd.DataFrame(rows, columns=["seconds", "life", "step", "role", "mebibytes"])
    found = soak_page.slopes(memory, lives)
    # A life ends with its driver's last record, less the seconds that do not count.
    within = memory.seconds - 200 * (memory.life - 1)
    counted = memory[(within > soak_page.WARM_UP) & (within < 94 - soak_page.ENDING)]
    design = np.stack([counted.step, counted.life == 1, counted.life == 2], axis=1).astype(float)
    solution, residual, *_ = np.linalg.lstsq(design, counted.mebibytes.to_numpy(), rcond=None)
    error = np.sqrt(residual[0] / (len(counted) - 3) * np.linalg.inv(design.T @ design)[0, 0])
    assert found.loc["driver", ["slope", "error"]].tolist() == pytest.approx([100 * solution[0], 100 * error])
    assert found.slope["all"] == pytest.approx(found.slope["driver"])


def test_pages_are_those_of_their_records() -> None:
    page = (soak_page.PAGE / "README.md").read_text()
    for name, lines in soak_page.passages().items():
        assert marked(page, name) == "\n".join(lines)
    assert marked(kills.PAGE.read_text(), kills.MARKER) == kills.page()
    assert marked(nodes.PAGE.read_text(), "nodes") == nodes.page()


def test_records_show_what_the_pages_say() -> None:
    """Steps that were taken again are the same bit for bit, nodes change nothing, and a lost node ends the run by itself."""
    twice, steps = (pd.read_csv(soak_page.PAGE / f"{name}.csv") for name in ("twice", "steps"))
    assert twice["values"].sum() > 1000 and not twice.differing.any() and len(steps) == 301
    record = json.loads(nodes.RECORD.read_text())
    for pair in record["equal"]:
        gaps = {*pair["largest_difference"].values(), pair["largest_difference_of_parameters"]}
        assert (pair["rows_with_other_tokens"], gaps, pair["metrics_that_differ"]) == (0, {0.0}, {})
        assert set(pair["places"]) == {f"node{node}" for node in range(1, pair["ranks"] + 1)}
    for run in record["lost"]:
        assert run["ended_by_itself"] and run["status"] == 1 and run["resume_note"]
        assert any(f"10.77.0.{run['ranks']}" in line for line in run["message"])
        assert run["resumed_steps"] == list(range(1, nodes.STEPS + 2))
