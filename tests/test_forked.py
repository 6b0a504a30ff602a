"""The processes of ``tests/forked.py``: what they are given and give back, as forks and as interpreters of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import forked

PROBE = """
import json, os, sys
names = ("VERL_PLATFORM", "GIVEN", "TAKEN")
seen = {name: os.environ.get(name) for name in names}
print(json.dumps({"imported": "verl" in sys.modules, "name": __name__, "arguments": sys.argv[1:], "pid": os.getpid(), **seen}))
print("said", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fork", [True, False], ids=["fork", "interpreter"])
def test_a_module_runs_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: bool) -> None:
    (tmp_path / "probe_of_forks.py").write_text(PROBE)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("TAKEN", "there")
    for _ in range(2):  # nothing of one process is left in the next
        done = forked.run(
            "probe_of_forks", "one", "two words", fork=fork, GIVEN="a b", TAKEN=None, PYTHONPATH=str(tmp_path)
        )
        assert done.returncode == 3, done.stderr
        seen = json.loads(done.stdout)
        assert seen.pop("pid") != os.getpid()
        assert seen == {
            "imported": fork,
            "name": "__main__",
            "arguments": ["one", "two words"],
            "VERL_PLATFORM": "cpu" if fork else None,
            "GIVEN": "a b",
            "TAKEN": None,
        }
        assert done.stderr.splitlines()[-1] == "said"
