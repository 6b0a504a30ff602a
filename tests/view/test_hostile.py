"""Files that nobody wrote as they should: the page, its command and the analysis read them, or say what is wrong."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grail_advantage import report
from grail_advantage.analyze import KEYS, Response, read_responses
from grail_advantage.dump import read_dump
from tests.view.synthetic import write_dump, write_metrics

slow_machine = [HealthCheck.too_slow]
few = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=slow_machine)
texts = st.text("a1{ \u202e\x00", max_size=4)
leaves = st.none() | st.booleans() | st.integers(-3, 10**19) | st.floats() | texts
values = st.recursive(leaves, lambda own: st.lists(own, max_size=3) | st.dictionaries(texts, own), max_leaves=4)
good: dict[str, Any] = {"prompt": "a", "response": "b c"}


@few
@given(st.dictionaries(st.sampled_from(KEYS), values))
@example({"prompt": [{"role": None}], "response": [True]})
@example({"steps": ["a", 1], "error": -1})
@example({"reward": 10**400})
@example({"error": [0, 10**30]})
def test_a_line_is_a_response_or_is_named(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **changes}) + "\n")
        try:
            rows = read_responses(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}:")
        else:
            assert len(rows) == 2 and all(isinstance(row, Response) for row in rows)
            assert {str(row.id) for row in rows} == {row.id for row in rows}


def test_a_damaged_file_costs_its_own_responses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """Cut or with other bytes: the page is written without it and names it, once; the whole file is all there."""
    write_metrics(tmp_path, 2)
    write_dump(tmp_path / "tokens", (1, 2), problems=1)
    path, rng = tmp_path / "tokens" / "step_000002.parquet", np.random.default_rng(0)
    whole = path.read_bytes()
    for place in range(12):
        content = bytearray(whole)
        if place % 2:
            content = content[: int(rng.integers(1, len(content)))]
        else:
            for at in rng.integers(len(content) - 2000, len(content), 40):
                content[at] = rng.integers(256)
        path.write_bytes(content)
        assert report.main([str(tmp_path)]) == 0
        named = [record for record in caplog.records if "step_000002" in record.getMessage()]
        assert len(named) == 1 and "step_000002" not in capsys.readouterr().err
        caplog.clear()


def test_columns_of_other_types_are_named(tmp_path: Path) -> None:
    write_dump(tmp_path / "tokens", (1,), problems=1)
    path = tmp_path / "tokens" / "step_000001.parquet"
    table = pq.read_table(path)
    for name, values in (("weight", ["x"] * len(table)), ("tokens", [1] * len(table)), ("step", [["a"]] * len(table))):
        changed = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
        dump = read_dump(tmp_path / "tokens")
        assert list(dump) == [] and len(dump.problems) == 1 and str(path) in dump.problems[0]
    pq.write_table(table.replace_schema_metadata({"grail_advantage": "no json"}), path)
    assert report.main([str(tmp_path)]) == 0
