"""The table of planted faults fits the code, so that a run of ``python -m tests.mutations`` begins."""

from tests.mutations import FAULTS, ROOT, planted


def test_every_fault_finds_its_place():
    for fault in FAULTS:
        source = (ROOT / fault.file).read_text()
        assert planted(source, fault) != source, fault
        file, _, _ = fault.test.partition("::")
        assert all((ROOT / "tests" / name).is_file() for name in file.split()), fault
