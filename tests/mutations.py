"""Planted faults: one line of the package changed, and the test that must fail then.

    python -m tests.mutations [PARTS OF FILES' NAMES]

A row of ``mutations.json`` has a file, below ``grail_advantage`` or in ``bench`` or ``recipe``; a test below ``tests``; a text
that is once in the file; and what takes its place. A third are in formulas, the others in what leads from a formula to a host:
fills, shares, rates, means, files. Each is made in a copy of the project, whose tests run there. A fault that its test does not
see survives, and the status is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FAILED = 1
"""pytest's status where tests failed; others say that it ran none."""


def status_of(folder: Path, *tests: str) -> int:
    """pytest's, of tests in a copy of the project."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if tests[0].startswith("trl_ext"):
        environment["PYTHONPATH"] += f"{os.pathsep}{Path(sys.prefix) / 'trl'}"
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/{test}" for test in tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode > FAILED:
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def main(*parts: str) -> int:
    chosen = [row for row in FAULTS if not parts or any(part in row[0] for part in parts)]
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listed = "git ls-files -z --cached --others --exclude-standard"
        subprocess.run(f"{listed} | xargs -0 cp --parents --target-directory {name}", shell=True, cwd=ROOT)
        for file, test, old, new in chosen:
            path = folder / f"{'' if file.startswith(('bench/', 'recipe/')) else 'grail_advantage/'}{file}.py"
            source = path.read_text(encoding="utf-8")
            assert source.count(old) == 1, f"{path} has not {old!r} once"
            path.write_text(source.replace(old, new), encoding="utf-8")
            survives = status_of(folder, test) != FAILED
            path.write_text(source, encoding="utf-8")
            wrong += survives
            print("SURVIVES" if survives else "caught  ", f"{file}: {old} -> {new or 'nothing'}, by {test}", flush=True)
        for of_trl in (False, True):  # a test that always fails would see nothing
            tests = sorted({test for _, test, *_ in chosen if test.startswith("trl_ext") == of_trl})
            if tests and status_of(folder, *tests):
                print(f"without a change these must pass: {' '.join(tests)}")
                wrong += 1
    print(f"{len(chosen)} faults; {wrong} to look at")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
