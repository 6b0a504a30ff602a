"""The table of faults: every proof exists, and the page is the one written last."""

from __future__ import annotations

import ast
import functools
import runpy
from pathlib import Path

import pytest

from recipe.marked_text import marked
from tests.faults import FAULTS, SECTIONS, Fault

ROOT = Path(__file__).parents[1]


@functools.cache
def _tests(path: Path) -> frozenset[str]:
    """Names of a file's test functions and classes, ``Class::test`` for those in a class."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(name for name in found if name.split("::")[-1].startswith(("test_", "Test")))


def _exists(proof: str) -> bool:
    if proof.startswith("docs/"):
        return (ROOT / proof).is_file()
    file, _, name = proof.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and (not name or name.partition("[")[0] in _tests(path))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.place}: {fault.fault}")
def test_a_fault_is_shown_by_something(fault: Fault) -> None:
    assert fault.about in SECTIONS
    assert fault.proof
    assert [proof for proof in fault.proof if not _exists(proof)] == []
    assert "|" not in "".join(fault[1:4]) and "\n" not in "".join(fault[1:4])


def test_what_does_not_exist_is_found() -> None:
    assert _exists("test_faults.py::test_what_does_not_exist_is_found[a]")
    for proof in ("no/test_a.py", "test_faults.py::test_another", "test_faults.py::_exists", "docs/none.md"):
        assert not _exists(proof)


def test_no_fault_stands_twice() -> None:
    named = [(fault.fault, fault.place) for fault in FAULTS]
    assert len(set(named)) == len(named)


def test_the_page_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "fault_table.py"))
    assert marked(script["PAGE"].read_text(encoding="utf-8"), script["MARKER"]) == script["tables"]().strip()
