"""The pages of kills and nodes are those of their records."""

from __future__ import annotations

import json

from benchmarks.endurance import kills, nodes
from recipe.marked_text import marked


def test_pages_are_those_of_their_records() -> None:
    assert marked(kills.PAGE.read_text(), kills.MARKER) == kills.page()
    assert marked(nodes.PAGE.read_text(), "nodes") == nodes.page()


def test_records_show_what_the_pages_say() -> None:
    """Nodes change nothing, and a lost node ends the run by itself."""
    record = json.loads(nodes.RECORD.read_text())
    for pair in record["equal"]:
        gaps = {*pair["largest_difference"].values(), pair["largest_difference_of_parameters"]}
        assert (pair["rows_with_other_tokens"], gaps, pair["metrics_that_differ"]) == (0, {0.0}, {})
        assert set(pair["places"]) == {f"node{node}" for node in range(1, pair["ranks"] + 1)}
    for run in record["lost"]:
        assert run["ended_by_itself"] and run["status"] == 1 and run["resume_note"]
        assert any(f"10.77.0.{run['ranks']}" in line for line in run["message"])
        assert run["resumed_steps"] == list(range(1, nodes.STEPS + 2))
