"""Files that nobody wrote as they should: the page, its command and the analysis read them, or say what is wrong."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.__main__ import main as bench
from grail_advantage import report
from grail_advantage.analyze.lines import KEYS, Response, read_responses
from grail_advantage.dump import RECEIVED_SCHEMA, read_dump
from grail_advantage.receipt import Finding
from grail_advantage.view import receipt
from tests.dumps import received_header
from tests.view.synthetic import write_dump, write_metrics

slow_machine = [HealthCheck.too_slow]
few = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=slow_machine)
texts = st.text("a1{ \u202e\x00", max_size=4)
leaves = st.none() | st.booleans() | st.integers(-3, 10**19) | st.floats() | texts
values = st.recursive(
    leaves, lambda own: st.lists(own, max_size=3) | st.dictionaries(texts, own), max_leaves=4
)
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
    path = tmp_path / "tokens" / "step_000002.parquet"
    rng = np.random.default_rng(0)
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


EVIL = "\x1b]52;c;aGk=\x07\x1b[31m\u202e"
HEADERS: list[Any] = [
    [], 1, None, "x", {"a": 1}, {EVIL: 1, "step": EVIL}, {"step": [], "method": EVIL}, {"step": 10**400, "method": "m"},
    {"step": 1, "method": {"x": EVIL}}, {"step": 1}, {"method": "m"}, {"step": None, "method": None},
    *({"step": 1, "method": "m", "special_tokens": own} for own in ([], "x", {EVIL: "x"}, {"1": [EVIL]}, {"1": None})),
    *({"step": 1, "method": "m", "options": own} for own in ([], EVIL, 3)),
    *({"step": 1, "method": "m", name: [EVIL]} for name in ("update", "model", "temperature", "rows_in_step", "answer")),
    {"step": 1, "method": "m", "schema_version": EVIL}, {"step": 1, "method": "m", "schema_version": 10**400},
]  # fmt: skip
RECORDS: list[dict[str, Any]] = [
    *({"findings": own} for own in (EVIL, 1, None, {EVIL: 1}, [EVIL], [[]], [{"name": EVIL}])),
    *({name: 10**400} for name in ("tokens", "updates", "step")),
    *({name: own} for name in ("tokens", "updates", "clipped", "seen_from", "responses") for own in (EVIL, [[EVIL]], {})),
    {"loss": [EVIL]}, {"loss": None},
    {"responses": [EVIL, 1]}, {"responses": [1]}, {"tokens": -1}, {"step": True, "update": None},
]  # fmt: skip
FINDINGS: list[dict[str, Any]] = [
    *({name: own} for name in ("name", "where", "what", "causes", "also") for own in (1, None, [EVIL])),
    *({name: own} for name in ("size", "tokens", "low", "high", "explains") for own in (EVIL, [], {})),
    {"tokens": 10**400}, {"tokens": 0.5},
    *({"examples": own} for own in (EVIL, 1, [1], [[EVIL]], [["a", 1, 2]], [["a", EVIL, 1.0, 1.0]], [["a", 10**400, 1, 1]])),
    {"examples": [["a", 1, EVIL, 1.0]]}, {"mismatch": EVIL},
]  # fmt: skip


def columns_of(table: pa.Table) -> dict[str, list[Any]]:
    """Values that a column of that type can hold and no writer gives."""
    long = [[1.0] * 3] * len(table)
    none = [None] * len(table)
    methods = [{"name": "a", "score": None, "advantage": None, "weight": [1.0], "no_scores": None}]
    named = [{**methods[0], "name": name, "weight": None} for name in ("a", "a")]
    return {
        "weight": [long, none, [[None] * len(of) for of in table["weight"].to_pylist()]],
        "advantage": [long, none],
        "mask": [
            [[True] * 2] * len(table),
            none,
            [[None] * len(of) for of in table["mask"].to_pylist()],
        ],
        "tokens": [
            [[EVIL]] * len(table),
            none,
            [[None] * len(of) for of in table["tokens"].to_pylist()],
        ],
        "score": [long],
        "old_log_prob": [long],
        "base_advantage": [long],
        "span": [
            [own] * len(table)
            for own in ([], [1], [3, 2, 1, 0], [-5, 1, 2, 3], [0, 1, 2, 10**18], [0, 1, 2, None])
        ],
        "labels": [
            [own] * len(table)
            for own in (EVIL, "[]", "1", "[" * 5000, '{"steps": 1, "turn_rewards": {"a": []}}')
        ],
        "methods": [
            [methods] * len(table),
            [named] * len(table),
            [[], *([methods] * (len(table) - 1))],
        ],
        "key": [none],
        "prompt": [none],
        "group": [none],
        "reward": [[math.nan] * len(table), [math.inf] * len(table)],
        "outcome": [[EVIL] * len(table)],
        "answer": [[EVIL] * len(table)],
        "no_scores": [[EVIL] * len(table)],
    }


KEYS_OF = {"step": "grail_advantage", "received": "grail_advantage_received"}


class Foreign:
    """A run whose first step's files others wrote, beside a good second step."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.run = folder / f"run{EVIL}"
        self.capsys = capsys
        self.caplog = caplog
        self.tokens = self.run / "tokens"
        write_dump(self.tokens, (1, 2), problems=1)
        self.good = pq.read_table(self.tokens / "step_000001.parquet")
        self.header = {"schema_version": 5, "step": 1, "method": "grail"}

    def put(self, table: pa.Table, record: Any, kind: str = "step") -> None:
        table = table.replace_schema_metadata({KEYS_OF[kind]: json.dumps(record)})
        pq.write_table(table, self.tokens / f"{kind}_000001.parquet")

    def problems(self, *others: Callable[[], Any]) -> list[str]:
        """Run all that read a dump: none ends in a traceback, no escape reaches the terminal, and the second step is there."""
        self.capsys.readouterr()
        self.caplog.clear()
        assert report.main([str(self.run)]) == 0
        receipt.main([str(self.run), "--fail-on", "nothing"])
        for other in others:
            with suppress(SystemExit):
                other()
        dump = read_dump(self.tokens)
        assert {2} <= {row.step for row in dump.rows()} <= {1, 2} and dump.files[
            1
        ].header is not None
        assert dump.files[0].header is None or isinstance(dump.files[0].header.method, str)
        said = "".join([*self.capsys.readouterr(), *self.caplog.messages])
        assert not set(said) & set("\x1b\x07\u202e") and "Traceback" not in said
        dump.receipts()
        return dump.problems


@pytest.fixture
def foreign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Foreign:
    return Foreign(tmp_path, capsys, caplog)


def test_a_foreign_header_costs_its_file(foreign: Foreign) -> None:
    for record in HEADERS:
        plain = isinstance(record, dict) and "a" not in record
        foreign.put(foreign.good, foreign.header | record if plain else record)
        problems = foreign.problems()
        assert plain or "step_000001" in problems[0]
    foreign.put(foreign.good, foreign.header | {"later": EVIL})
    assert not foreign.problems() and len(list(read_dump(foreign.tokens))) == 16, (
        "a later version put something in"
    )


def test_foreign_columns_cost_their_file(foreign: Foreign) -> None:
    figure = partial(
        report.main,
        [str(foreign.run), "--figure", "methods", "--step", "1", "--output", "figure.svg"],
    )
    for name, choices in columns_of(foreign.good).items():
        place = foreign.good.schema.get_field_index(name)
        kind = foreign.good.schema.field(name)
        for values in choices:
            foreign.put(
                foreign.good.set_column(place, kind, pa.array(values, kind.type)), foreign.header
            )
            problems = foreign.problems(figure, partial(bench, [str(foreign.tokens)]))
            harmless = name in (
                "reward",
                "outcome",
                "answer",
                "no_scores",
            ) or "turn_rewards" in str(values[0])
            assert harmless or "step_000001" in problems[0]


def test_foreign_files_of_what_arrived_cost_themselves(foreign: Foreign) -> None:
    lengths = [len(of) for of in foreign.good["mask"].to_pylist()]
    numbers = [[0.5] * length for length in lengths]
    count = len(lengths)
    plain: dict[str, Any] = {name: numbers for name in ("received", "clipped", "effect")}
    plain |= {name: [[own] for own in numbers] for name in ("by_update", "clipped_by_update")}
    plain["key"] = foreign.good["key"].to_pylist()
    plain["updates"] = [[0]] * count
    finding = Finding("scaled", "here", 0.5, "half", (("a", 1, 1.0, 0.5),)).to_dict()
    whole = {"schema_version": 5, **received_header(1, findings=[finding])}
    tables = [{name: [[0.5]] * count} for name in ("received", "clipped", "effect")]
    tables += [{name: [[[0.5]]] * count} for name in ("by_update", "clipped_by_update")]
    tables += [{"by_update": [[None]] * count}, {"key": [None] * count}]
    for table in tables:
        foreign.put(pa.table(plain | table, schema=RECEIVED_SCHEMA), whole, "received")
        assert "received_000001" in foreign.problems()[0]
    records = [whole | record for record in RECORDS] + [
        whole | {"findings": [finding | own]} for own in FINDINGS
    ]
    arrived = pa.table(plain, schema=RECEIVED_SCHEMA)
    for record in records:
        foreign.put(arrived, record, "received")
        assert (
            "received_000001" in foreign.problems()[0]
            and read_dump(foreign.tokens).receipts() == []
        )
    later = {"later": 1, "findings": [{**finding, "later": EVIL}]}
    foreign.put(arrived, whole | later, "received")
    assert not foreign.problems() and len(read_dump(foreign.tokens).receipts()) == 1


def test_columns_of_other_types_are_named(tmp_path: Path) -> None:
    write_dump(tmp_path / "tokens", (1,), problems=1)
    path = tmp_path / "tokens" / "step_000001.parquet"
    table = pq.read_table(path)
    for name, values in (
        ("weight", ["x"] * len(table)),
        ("tokens", [1] * len(table)),
        ("step", [["a"]] * len(table)),
    ):
        changed = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
        dump = read_dump(tmp_path / "tokens")
        assert list(dump) == [] and len(dump.problems) == 1 and str(path) in dump.problems[0]
    pq.write_table(table.replace_schema_metadata({"grail_advantage": "no json"}), path)
    assert report.main([str(tmp_path)]) == 0
