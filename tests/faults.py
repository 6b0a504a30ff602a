"""Deliberate faults: small changes of behaviour that a careless commit could make, each of which some test must see.

``python -m tests.faults --any 10`` takes ten of tests/faults.toml. Each goes into a copy of the tree of its own. It is caught
where a test fails that passes without the fault, which is tried at the end. Foreign libraries are imported once: the tests run
in forks of this process, which load the project's own code from the copy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CAUGHT, NOT_CAUGHT, ERROR = "caught", "not caught", "error"
TRL = "TRL"  # the room whose tests run with TRL on the path, in a folder of its own; see tests/trl_ext/test_trl.py
WARM = ("torch.distributed.fsdp", "transformers.modeling_utils", "ray", "tensordict", "transfer_queue", "hydra")
"""Libraries that most tests import. Not verl, which asks its plug-ins on import which device there is."""


class Fault(NamedTuple):
    """A text of a file, and the text that takes its place."""

    id: str
    room: str
    breaks: str  # the behaviour that is lost, in one sentence
    file: str
    text: str
    instead: str
    tests: list[str]  # files, or patterns of files, whose tests could see it


class Outcome(NamedTuple):
    """The end of the tests: the verdict, the test that failed or the reason of an error, and the seconds."""

    verdict: str
    by: str = ""
    seconds: float = 0.0


FAULTS = [Fault(**entry) for entry in LIST["fault"]]


def occurrences(fault: Fault, root: Path) -> int:
    """How often the fault's text stands in its file; 0 where there is no such file."""
    path = root / fault.file
    return path.read_text().count(fault.text) if path.is_file() else 0


def files_of(patterns: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """The files of these patterns, below a root, and the patterns without a file."""
    files = {pattern: [str(path.relative_to(root)) for path in root.glob(pattern)] for pattern in patterns}
    return sorted({path for each in files.values() for path in each}), [each for each in files if not files[each]]


def run_tests(root: Path, arguments: Sequence[str], seconds: float, fault: Fault | None, trl: bool) -> Outcome:
    """Run pytest in a copy of the files that git tracks or does not ignore, with a fault or without."""
    with tempfile.TemporaryDirectory(prefix="fault_") as folder:
        copy, log = Path(tempfile.mkdtemp(dir=folder)), Path(folder) / "log"
        files = "git ls-files -z --cached --others --exclude-standard"
        subprocess.run(f"{files} | xargs -0 cp --parents --target-directory={copy}", shell=True, cwd=root, check=False)
        if fault is not None:
            (copy / fault.file).write_text((root / fault.file).read_text().replace(fault.text, fault.instead))
        began = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(copy, log, arguments, trl))
        process.start()
        process.join(seconds)
        took = round(time.monotonic() - began, 1)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            return Outcome(ERROR, f"no end within {seconds:.0f} s; see --seconds", took)
        output = log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.M)
    if process.exitcode in (1, 2) and failed:
        return Outcome(CAUGHT, failed[0] if fault else " ".join(failed), took)
    if process.exitcode == 0 and re.search(r"^\d+ passed", output, flags=re.M):
        return Outcome(NOT_CAUGHT, "", took)
    return Outcome(ERROR, f"pytest ended with {process.exitcode}: {output[-300:]}", took)


def _pytest(copy: Path, log: Path, arguments: Sequence[str], trl: bool) -> None:
    """The process of a copy's tests: it imports the project from the copy."""
    os.setsid()
    with log.open("w") as file:
        [os.dup2(file.fileno(), stream) for stream in (1, 2)]
    os.chdir(copy)
    places = [str(copy), f"{sys.prefix}/trl"] if trl else [str(copy)]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    sys.path = [*places, *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [each for each in sys.modules if each.split(".")[0] in ("tests", "grail_advantage")]:
        del sys.modules[name]
    sys.modules["__main__"] = type(sys)("__main__")  # for processes that the tests start
    sys.exit(pytest.main(["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments]))


def check(chosen: Sequence[Fault], root: Path, options: argparse.Namespace) -> list[str]:
    """The verdict on each fault; outcomes are printed and recorded as they come."""
    caught: dict[tuple[str, bool], dict[str, str]] = {}
    outcomes: dict[str, Outcome] = {}
    commit = subprocess.getoutput(f"git -C {root} rev-parse --short HEAD")

    def note(name: str, outcome: Outcome) -> None:
        outcomes[name] = outcome
        print("{:<30} {:<10} {} ({:.0f} s)".format(name, *outcome), flush=True)
        if options.record:
            recorded = json.loads(options.json.read_text()) if options.json.is_file() else {}
            suite = recorded.setdefault(options.record, {"results": {}})
            suite["commit"], suite["results"][name] = commit, outcome
            options.json.write_text(json.dumps(recorded, indent=1) + "\n")

    for fault in chosen:
        paths, missing = files_of(["tests/**/test_*.py"] if options.fast else options.tests or fault.tests, root)
        if missing:
            note(fault.id, Outcome(ERROR, f"there is no {', '.join(missing)}"))
        elif (count := occurrences(fault, root)) != 1:
            note(fault.id, Outcome(ERROR, f"its text stands {count} times in {fault.file}"))
        else:
            outcome = run_tests(root, ["-x", *options.pytest, *paths], options.seconds, fault, fault.room == TRL)
            note(fault.id, outcome)
            if outcome.verdict == CAUGHT:
                test = outcome.by.split("[")[0]
                caught.setdefault((test.split("::")[0], fault.room == TRL), {})[fault.id] = test
    for (_, trl), of_faults in caught.items():
        alone = run_tests(root, sorted({*of_faults.values()}), 3 * options.seconds, None, trl)
        for name, test in of_faults.items():
            if alone.verdict == ERROR or test in alone.by:
                note(name, Outcome(ERROR, f"without the fault: {alone.by}"))
    return [outcome.verdict for outcome in outcomes.values()]


def page(recorded: dict) -> str:
    """The page of all faults, with the outcome of each recorded suite."""
    runs = [[Outcome(*run["results"].get(fault.id, ("not run",))) for fault in FAULTS] for run in recorded.values()]
    lines = [LIST["introduction"]]
    for (suite, run), results in zip(recorded.items(), runs, strict=True):
        caught = f"{sum(CAUGHT in each for each in results)} of {len(run['results'])} faults caught"
        lines.append(f"- {suite} suite, commit {run['commit']}: {caught}")
    lines += ["", "| room | fault |" + "".join(f" {suite} suite: caught by | s |" for suite in recorded)]
    lines.append("|---|---|" + "---|--:|" * len(recorded))
    for fault, *results in zip(FAULTS, *runs, strict=True):
        cells = [fault.room, f"`{fault.id}`: {fault.breaks}"]
        for verdict, by, seconds in results:
            cells += [f"`{by.removeprefix('tests/')}`" if verdict == CAUGHT else f"**{verdict}**", f"{seconds:.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("ids", nargs="*", help="faults by their ids; all by default")
    add("--room", help="the faults of a room")
    add("--any", type=int, metavar="N", help="N of the faults by chance")
    add("--seed", type=int, default=0, help="of --any")
    add("--root", type=Path, default=ROOT, help="another checkout, with tests of its own")
    add("--tests", nargs="+", metavar="PATTERN", help="test files in place of the faults' own")
    add("--fast", action="store_true", help="all tests that are not slow, in place of the faults' own")
    add("--seconds", type=float, default=300, help="most seconds for the tests of a fault")
    add("--record", metavar="NAME", help="put the results into the file --json, as those of the suite NAME")
    add("--json", type=Path, default=Path("docs/dev/deliberate_faults.json"), help="the recorded results (%(default)s)")
    add("--table", action="store_true", help="only write the page of the recorded results, beside --json")
    options = parser.parse_args()
    if options.table:
        options.json.with_suffix(".md").write_text(page(json.loads(options.json.read_text())))
        return
    options.pytest = ["-m", "not slow"] * options.fast
    if unknown := {*options.ids} - {fault.id for fault in FAULTS}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    chosen = [each for each in FAULTS if each.id in (options.ids or [each.id]) and options.room in (None, each.room)]
    if options.any:
        chosen = random.Random(options.seed).sample(chosen, min(options.any, len(chosen)))
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    for name in WARM:
        importlib.import_module(name)
    verdicts = check(chosen, options.root.resolve(), options)
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (CAUGHT, NOT_CAUGHT, ERROR)))
    sys.exit(verdicts.count(CAUGHT) < len(verdicts))


if __name__ == "__main__":
    main()
