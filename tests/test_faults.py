"""The list of deliberate faults holds for the code as it is."""

from __future__ import annotations

from tests.faults import FAULTS, ROOT, files_of, occurrences


def test_every_fault_stands_once_in_its_file_and_changes_it() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert {fault.id: count for fault in FAULTS if (count := occurrences(fault, ROOT)) != 1} == {}
    assert [fault.id for fault in FAULTS if fault.text == fault.instead] == []


def test_the_test_files_of_every_fault_are_there() -> None:
    assert {fault.id: missing for fault in FAULTS if (missing := files_of(fault.tests, ROOT)[1])} == {}
