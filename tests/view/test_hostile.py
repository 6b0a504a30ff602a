"""Files that nobody wrote as they should: the page, its command and the analysis read them, or say what is wrong."""

import json
import math
import tempfile
from collections.abc import Callable, Iterable
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
from grail_advantage.dump import _KEYS, read_dump
from grail_advantage.receipt import Finding
from grail_advantage.view import receipt
from tests.dumps import received, received_header
from tests.view.synthetic import write_dump, write_metrics

texts = st.text("a1{ \u202e\x00", max_size=4)
leaves = st.none() | st.booleans() | st.integers(-3, 10**19) | st.floats() | texts
values = st.recursive(
    leaves,
    lambda own: st.lists(own, max_size=3) | st.dictionaries(texts, own),
    max_leaves=4,
)
good = {"prompt": "a", "response": "b c"}


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from(KEYS), values))
@example({"prompt": [{"role": None}], "response": [True]})
@example({"steps": ["a", 1], "error": -1})
@example({"reward": 10**400})
@example({"error": [0, 10**30]})
def test_a_line_is_a_response_or_is_named(changes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **changes}) + "\n")
        try:
            rows = read_responses(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}:")
        else:
            assert len(rows) == 2
            assert all(isinstance(row, Response) for row in rows)


def test_a_damaged_file_costs_its_own_responses(tmp_path, capsys, caplog):
    """Cut or with other bytes: the page is written without it and names it, once."""
    write_metrics(tmp_path, 2)
    write_dump(tmp_path, (1, 2), problems=1)
    path = tmp_path / "tokens" / "step_000002.parquet"
    rng = np.random.default_rng(0)
    whole = path.read_bytes()
    for place in range(12):
        content = bytearray(whole)
        # By turns cut somewhere, and with other bytes.
        if place % 2:
            content = content[: int(rng.integers(1, len(content)))]
        else:
            # At the end, where Parquet keeps what the file consists of.
            for at in rng.integers(len(content) - 2000, len(content), 40):
                content[at] = rng.integers(256)
        path.write_bytes(content)
        assert report.main([str(tmp_path)]) == 0
        (message,) = caplog.messages
        assert "step_000002" in message
        assert "step_000002" not in capsys.readouterr().err
        caplog.clear()


EVIL = "\x1b]52;c;aGk=\x07\x1b[31m\u202e"
HUGE = 10**400


def changes_of(*choices: tuple[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Each of the values, of each of the names that a blank separates."""
    return [
        {name: value}
        for names, values in choices
        for name in names.split()
        for value in values
    ]


HEADERS = changes_of(
    ("step", [EVIL, [], HUGE, None]),
    ("method", [EVIL, {"x": EVIL}, None]),
    ("special_tokens", [[], "x", {EVIL: "x"}, {"1": [EVIL]}, {"1": None}]),
    ("options", [[], EVIL, 3]),
    ("update model temperature rows_in_step answer", [[EVIL]]),
    ("schema_version", [EVIL, HUGE]),
    (EVIL, [1]),
)
NO_HEADERS = [[], 1, None, "x", {"a": 1}]
RECORDS = changes_of(
    ("findings", [EVIL, 1, None, {EVIL: 1}, [EVIL], [[]], [{"name": EVIL}]]),
    ("tokens updates clipped seen_from responses", [EVIL, [[EVIL]], {}]),
    ("tokens updates step", [HUGE]),
    ("loss", [[EVIL], None]),
    ("responses", [[EVIL, 1], [1]]),
    ("tokens", [-1]),
    ("update", [None]),
)
FINDINGS = changes_of(
    ("name where what causes also", [1, None, [EVIL]]),
    ("size tokens low high explains", [EVIL, [], {}]),
    ("tokens", [HUGE, 0.5]),
    ("examples", [EVIL, 1, [1], [[EVIL]], [["a", 1, 2]]]),
    ("examples", [[["a", EVIL, 1.0, 1.0]], [["a", HUGE, 1, 1]], [["a", 1, EVIL, 1.0]]]),
    ("mismatch", [EVIL]),
)


HARMLESS = [
    ("outcome", EVIL),
    ("answer", EVIL),
    ("no_scores", EVIL),
    ("reward", math.nan),
    ("reward", math.inf),
    ("labels", '{"steps": 1, "turn_rewards": {"a": []}}'),
]
"""Values of a response that a reader takes as they are."""


def columns_of(table: pa.Table) -> list[tuple[str, list[Any]]]:
    """Columns, by name, of values that their type can hold and no writer gives."""
    count = len(table)
    method = {"name": "a", "weight": [1.0]}
    equal = changes_of(
        ("weight advantage score old_log_prob base_advantage", [[1.0] * 3]),
        ("mask", [[True] * 2]),
        ("tokens", [[EVIL]]),
        ("weight advantage mask tokens key prompt group", [None]),
        # Too few, falling, negative, beyond the tokens, and with a null.
        (
            "span",
            [[], [1], [3, 2, 1, 0], [-5, 1, 2, 3], [0, 1, 2, 10**18], [0, 1, 2, None]],
        ),
        ("labels", [EVIL, "[]", "1", "[" * 5000]),
        ("methods", [[method], [{"name": "a"}] * 2]),
    )
    columns = [
        (name, [value] * count) for change in equal for name, value in change.items()
    ]
    for name in ("weight", "mask", "tokens"):
        lengths = map(len, table[name].to_pylist())
        columns.append((name, [[None] * length for length in lengths]))
    return [*columns, ("methods", [[], *([[method]] * (count - 1))])]


class Foreign:
    """A run whose first step's files others wrote, beside a good second step."""

    def __init__(self, folder: Path, capsys, caplog):
        self.run = folder / f"run{EVIL}"
        self.capsys = capsys
        self.caplog = caplog
        self.tokens = self.run / "tokens"
        write_dump(self.run, (1, 2), problems=1)
        self.good = pq.read_table(self.tokens / "step_000001.parquet")
        self.header = {"schema_version": 5, "step": 1, "method": "grail"}

    def put(self, table: pa.Table, record, kind: str = "step"):
        metadata = {_KEYS[kind]: json.dumps(record)}
        path = self.tokens / f"{kind}_000001.parquet"
        pq.write_table(table.replace_schema_metadata(metadata), path)

    def put_column(self, name: str, values: list[Any], kind=None):
        place = self.good.schema.get_field_index(name)
        column = pa.array(values, kind or self.good.schema.field(name).type)
        self.put(self.good.set_column(place, name, column), self.header)

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
        assert {2} <= {row.step for row in dump.rows()} <= {1, 2}
        first, second = (file.header for file in dump.files)
        assert second is not None
        assert first is None or isinstance(first.method, str)
        # Escapes and a right-to-left override would act on the terminal.
        printed = "".join([*self.capsys.readouterr(), *self.caplog.messages])
        assert not set(printed) & set("\x1b\x07\u202e")
        assert "Traceback" not in printed
        dump.receipts()
        return dump.problems


@pytest.fixture
def foreign(tmp_path, capsys, caplog):
    return Foreign(tmp_path, capsys, caplog)


def test_a_foreign_header_costs_its_file(foreign):
    for record in NO_HEADERS:
        foreign.put(foreign.good, record)
        assert "step_000001" in foreign.problems()[0]
    # Some of these do no harm.
    for change in HEADERS:
        foreign.put(foreign.good, foreign.header | change)
        foreign.problems()
    # A later version may put something in.
    foreign.put(foreign.good, foreign.header | {"later": EVIL})
    assert not foreign.problems()
    assert len(list(read_dump(foreign.tokens))) == 16


def test_foreign_columns_cost_their_file(foreign):
    """Values that no writer gives, and those of another type."""
    figure = ["--figure", "methods", "--step", "1"]
    readers = (
        partial(report.main, [str(foreign.run), *figure]),
        partial(bench, [str(foreign.tokens)]),
    )
    for name, values in columns_of(foreign.good):
        foreign.put_column(name, values)
        assert "step_000001" in foreign.problems(*readers)[0], (name, values[0])
    count = len(foreign.good)
    for name, value in (("weight", "x"), ("tokens", 1)):
        foreign.put_column(name, [value] * count, pa.scalar(value).type)
        (problem,) = foreign.problems(*readers)
        assert "step_000001" in problem
    for name, value in HARMLESS:
        foreign.put_column(name, [value] * count)
        foreign.problems(*readers)


def test_foreign_files_of_what_arrived_cost_themselves(foreign):
    keys = foreign.good["key"].to_pylist()
    numbers = [[0.5] * len(mask) for mask in foreign.good["mask"].to_pylist()]
    count = len(keys)
    finding = Finding(EVIL, EVIL, 0.5, EVIL, ((EVIL, 1, 1.0, 0.5),), EVIL).to_dict()
    whole = {"schema_version": 5, **received_header(1, findings=[finding])}
    tables = changes_of(
        ("received clipped effect", [[[0.5]] * count]),
        ("by_update clipped_by_update", [[[[0.5]]] * count]),
        ("by_update", [[[None]] * count]),
        ("key", [[None] * count]),
    )
    for columns in tables:
        columns = {"keys": keys, "effect": numbers, **columns}
        foreign.put(received(values=numbers, **columns), whole, "received")
        assert "received_000001" in foreign.problems()[0]
        # The responses are all there, without what they received.
        assert [row.received_T for row in read_dump(foreign.tokens)] == [None] * 16
    arrived = received(keys, numbers)
    records = [whole | record for record in RECORDS]
    records += [whole | {"findings": [finding | change]} for change in FINDINGS]
    for record in records:
        foreign.put(arrived, record, "received")
        assert "received_000001" in foreign.problems()[0]
        assert read_dump(foreign.tokens).receipts() == []
    later = {"later": 1, "findings": [{**finding, "later": EVIL}]}
    foreign.put(arrived, whole | later, "received")
    assert not foreign.problems()
    assert len(read_dump(foreign.tokens).receipts()) == 1
