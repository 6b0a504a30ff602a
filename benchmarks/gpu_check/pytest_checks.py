"""Tests of the suite as checks: each test is one, and a skipped one was not run."""

from __future__ import annotations

import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gpu_check.outcome import Outcome
from gpu_check.parts import last_line, run_command


def run_tests(outcome: Outcome, files: Sequence[str]) -> None:
    """Run test files with pytest, where it is installed, in a process of their own; its exit status counts too."""
    if find_spec("pytest") is None:
        outcome.not_run(", ".join(files), "needs pytest, which training does not: pip install 'pytest<9.2'")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}", *files]
        code, output = run_command(command)
        count = 0
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                count += 1
                _add(outcome, case)
    if code not in (0, 1) or not count:
        outcome.check(f"pytest runs {', '.join(files)}", False, f"exit status {code}: {last_line(output)}")


def _add(outcome: Outcome, case: ElementTree.Element) -> None:
    name = f"{case.get('classname', '').rsplit('.', 1)[-1]}: {case.get('name')}"
    for kind in ("failure", "error"):
        if (problem := case.find(kind)) is not None:
            outcome.check(name, False, (problem.get("message") or kind).splitlines()[0])
            return
    if (skipped := case.find("skipped")) is not None:
        outcome.not_run(name, (skipped.get("message") or "skipped").removeprefix("Skipped: "))
    else:
        outcome.check(name, True, f"{float(case.get('time', 0)):.0f} s")
