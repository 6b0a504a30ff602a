"""Deliberate faults: small changes of behaviour that a careless commit could make, each of which some test must see.

    python -m tests.faults                     all faults of tests/faults.toml, each against its own test files
    python -m tests.faults --any 10 --seed 1   ten of them by chance
    python -m tests.faults --room gates        those of a room; ids as plain arguments choose single ones
    python -m tests.faults --table docs/dev/deliberate_faults.md    writes the page of the recorded results, runs nothing

Each fault goes into a copy of the tree of its own. The test files that are to see it must first pass in a copy without a fault.
A fault counts as caught where a test fails, or where the tests do not end in time although they do without the fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
RECORDED = ROOT / "docs/dev/deliberate_faults.json"
CAUGHT, NOT_CAUGHT, ERROR = "caught", "not caught", "error"
FAST = ["tests", "-m", "not slow"]
INTRODUCTION = """# Deliberate faults in the code, and the tests that see them

Each row is a small change of behaviour that a careless commit could make, in `tests/faults.toml`. `python -m tests.faults` makes
them one at a time in a copy of the tree and runs the tests that could see it; `--any 10` takes ten by chance. This page is written
by `python -m tests.faults --table docs/dev/deliberate_faults.md`. Faults at run time are on another page ([faults.md](faults.md)).
"""


class Fault(NamedTuple):
    """A text of a file, and the text that takes its place."""

    id: str
    room: str
    breaks: str
    """The behaviour that is lost, in one sentence."""
    file: str
    text: str
    instead: str
    tests: list[str]
    """Files, or patterns of files, whose tests could see it."""


class Outcome(NamedTuple):
    """The end of the tests with one fault."""

    verdict: str
    by: str
    """The test that failed, or the reason of an error."""
    seconds: float


def faults() -> list[Fault]:
    """All faults, in the order of the list."""
    return [Fault(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]]


def occurrences(fault: Fault, root: Path) -> int:
    """How often the fault's text stands in its file; 0 where there is no such file."""
    path = root / fault.file
    return path.read_text(encoding="utf-8").count(fault.text) if path.is_file() else 0


def test_files(patterns: Iterable[str], root: Path) -> list[str]:
    """The files of these patterns, below a root.

    Raises:
        ValueError: naming the patterns without a file.
    """
    files = {pattern: sorted(str(path.relative_to(root)) for path in root.glob(pattern)) for pattern in patterns}
    missing = [pattern for pattern, found in files.items() if not found]
    if missing:
        raise ValueError(f"there is no {', '.join(missing)}")
    return list(dict.fromkeys(path for found in files.values() for path in found))


def copied(root: Path, folder: Path) -> Path:
    """A copy of the files of a working tree that git tracks or does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip("\0").split("\0"):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def run_tests(arguments: Sequence[str], copy: Path, seconds: float, *, trl: bool = False) -> tuple[int | None, str]:
    """Run pytest in a copy, whose packages come before any that are installed.

    Returns:
        Its exit status, ``None`` where it had to be ended, and its output.
    """
    # TRL has a folder of its own, since verl does not start beside it; see tests/trl_ext/test_trl.py.
    places = [str(copy), f"{sys.prefix}/trl"] if trl else [str(copy)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()


def failures(output: str) -> list[str]:
    """The tests that failed, by the last lines of pytest's output."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.M)


def broken_files(paths: Sequence[str], root: Path, seconds: float, *, trl: bool) -> dict[str, str]:
    """The test files that fail without any fault, and the tests in them that do."""
    with tempfile.TemporaryDirectory(prefix="fault_") as folder:
        status, output = run_tests(paths, copied(root, Path(folder)), seconds, trl=trl)
    failed = {name.split("::")[0]: name for name in failures(output)}
    return failed if status == 0 or failed else dict.fromkeys(paths, f"pytest ended with {status}: {output[-300:]}")


def outcome(fault: Fault, arguments: Sequence[str], root: Path, seconds: float) -> Outcome:
    """Whether the tests see the fault."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault_") as folder:
        copy = copied(root, Path(folder))
        count = occurrences(fault, copy)
        if count != 1:
            return Outcome(ERROR, f"its text stands {count} times in {fault.file}", 0.0)
        path = copy / fault.file
        path.write_text(path.read_text(encoding="utf-8").replace(fault.text, fault.instead), encoding="utf-8")
        status, output = run_tests(["-x", *arguments], copy, seconds, trl=fault.room == "TRL")
    took = round(time.monotonic() - began, 1)
    failed = failures(output)
    if status is None:
        return Outcome(CAUGHT, f"no end within {seconds:.0f} s", took)
    if status in (1, 2) and failed:
        return Outcome(CAUGHT, failed[0], took)
    if status == 0 and re.search(r"^\d+ passed", output, flags=re.M):
        return Outcome(NOT_CAUGHT, "", took)
    return Outcome(ERROR, f"pytest ended with {status}: {output[-300:]}", took)


def outcomes(chosen: Sequence[Fault], patterns: list[str] | None, root: Path, seconds: float) -> dict[str, Outcome]:
    """The outcome of each fault, printed as it comes."""
    found: dict[str, list[str]] = {}
    results: dict[str, Outcome] = {}
    for fault in chosen:
        try:
            found[fault.id] = FAST if patterns == FAST else test_files(patterns or fault.tests, root)
        except ValueError as error:
            results[fault.id] = Outcome(ERROR, str(error), 0.0)
    broken: dict[str, str] = {}
    for trl in (False, True):
        of_kind = [found[each.id] for each in chosen if each.id in found and (each.room == "TRL") == trl]
        if of_kind:
            print("the tests without a fault ...", flush=True)
            paths = FAST if patterns == FAST else sorted({path for paths in of_kind for path in paths})
            broken |= broken_files(paths, root, 4 * seconds, trl=trl)
    for fault in chosen:
        if fault.id in found:
            bad = broken if patterns == FAST else {path: broken[path] for path in found[fault.id] if path in broken}
            reason = f"fails without the fault: {', '.join(bad.values())}"
            results[fault.id] = (
                Outcome(ERROR, reason, 0.0) if bad else outcome(fault, found[fault.id], root, seconds)
            )
        result = results[fault.id]
        print(f"{fault.id:<32} {result.verdict:<10} {result.seconds:6.1f} s  {result.by}", flush=True)
    return results


def page(recorded: dict[str, Any]) -> str:
    """The page of all faults, with the outcome of each recorded suite."""
    lines = [INTRODUCTION]
    for suite, run in recorded.items():
        results = [Outcome(*each) for each in run["results"].values()]
        caught, seconds = sum(each.verdict == CAUGHT for each in results), sum(each.seconds for each in results)
        lines.append(f"- {suite} suite, commit {run['commit']}: {caught} of {len(results)} caught, {seconds:.0f} s in all")
    heads = "".join(f" {suite} suite: caught by | s |" for suite in recorded)
    lines += ["", f"| room | fault |{heads}", "|---|---|" + "---|--:|" * len(recorded)]
    for fault in faults():
        cells = [fault.room, f"`{fault.id}`: {fault.breaks}"]
        for run in recorded.values():
            result = Outcome(*run["results"].get(fault.id, ("not run", "", 0.0)))
            cells += [
                f"`{result.by.removeprefix('tests/')}`" if result.verdict == CAUGHT else f"**{result.verdict}**",
                f"{result.seconds:.0f}",
            ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def record(path: Path, suite: str, root: Path, results: dict[str, Outcome]) -> None:
    """Put results into a JSON file, in place of earlier ones of the same suite and fault."""
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    of_suite = recorded.setdefault(suite, {"results": {}})
    of_suite["commit"] = commit
    of_suite["results"] |= results
    path.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="faults by their ids; all by default")
    parser.add_argument("--room", help="the faults of a room")
    parser.add_argument("--any", type=int, metavar="N", help="N of the faults by chance")
    parser.add_argument("--seed", type=int, default=0, help="of --any")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout, with tests of its own")
    parser.add_argument("--tests", nargs="+", metavar="PATTERN", help="test files in place of the faults' own")
    parser.add_argument("--fast", action="store_true", help="all tests that are not marked slow, in place of the faults' own")
    parser.add_argument("--seconds", type=float, default=300.0, help="most seconds for the tests of a fault")
    parser.add_argument("--json", type=Path, help=f"record the results, as in {RECORDED.relative_to(ROOT)}")
    parser.add_argument("--suite", default="new", help="name of the suite in the record")
    parser.add_argument("--table", type=Path, help="only write the page of the recorded results")
    options = parser.parse_args()
    if options.table:
        options.table.write_text(page(json.loads((options.json or RECORDED).read_text())), encoding="utf-8")
        return
    chosen = faults()
    unknown = {*options.ids} - {fault.id for fault in chosen}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    chosen = [fault for fault in chosen if fault.id in options.ids or not options.ids]
    chosen = [fault for fault in chosen if options.room in (None, fault.room)]
    if options.any:
        chosen = random.Random(options.seed).sample(chosen, min(options.any, len(chosen)))
    results = outcomes(chosen, FAST if options.fast else options.tests, options.root.resolve(), options.seconds)
    if options.json:
        record(options.json, options.suite, options.root, results)
    verdicts = [result.verdict for result in results.values()]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (CAUGHT, NOT_CAUGHT, ERROR)))
    sys.exit(verdicts.count(CAUGHT) < len(verdicts))


if __name__ == "__main__":
    main()
