"""The table of planted faults fits the code, so that a run of ``python -m tests.mutations`` begins."""

import pytest

from tests.mutations import FAULTS, ROOT, Fault, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_finds_its_place(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    assert planted(source, fault) != source and (ROOT / "tests" / fault.test.partition("::")[0]).is_file()
