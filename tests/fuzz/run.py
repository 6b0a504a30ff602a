r"""Look for bytes that break a target, guided by the branches that they reach:

    pip install -r requirements-fuzz.txt
    python -m tests.fuzz.run dump --seconds 300

Goes on from ``tests/fuzz/corpus/TARGET`` and from what earlier runs put into ``--work`` (outputs/fuzz/TARGET). What breaks a
target stands there as ``crash-...``: mend it, and keep the file in the corpus under a name that says what it is. ``--keep``
minimises what the work folder holds and copies to the corpus what reaches new branches, for as long as it stays small.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.names import CORPUS, MODULES

SITE = Path(__file__).parents[2]
SEARCH = Path(__file__).with_name("search.py")
MOST_BYTES = 4096
KEPT_BYTES, KEPT_FILES = 1024, 24


def fuzz(target: str, *arguments: str, quiet: bool = False) -> str:
    """Run atheris on a target; what it printed."""
    command = [sys.executable, str(SEARCH), *arguments]
    paths = [str(SITE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "FUZZ_TARGET": target, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout:
        said.append(line)
        if not quiet:
            print(line, end="", flush=True)
    process.wait()
    return "".join(said)


def figures(said: str) -> dict[str, int]:
    """Executions, branches and features from the last line of libFuzzer that has them."""
    found = {}
    for name, pattern in (("executions", r"#(\d+)\s"), ("branches", r"cov: (\d+)"), ("features", r"ft: (\d+)")):
        matches = re.findall(pattern, said)
        found[name] = int(matches[-1]) if matches else 0
    return found


def keep(target: str, work: Path) -> int:
    """Copy into the corpus the smallest files that reach the branches of the work folder's; how many are new."""
    corpus = CORPUS / target
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "merged"
        shutil.copytree(corpus, merged, dirs_exist_ok=True)
        before = {path.name for path in merged.iterdir()}
        fuzz(target, "-merge=1", f"-max_len={KEPT_BYTES}", str(merged), str(work), quiet=True)
        new = sorted(
            (path for path in merged.iterdir() if path.name not in before), key=lambda path: path.stat().st_size
        )
        for path in new[: max(0, KEPT_FILES - len(before))]:
            shutil.copy(path, corpus / f"found_{path.name[:12]}")
        return len(new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(MODULES))
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--work", type=Path, default=SITE / "outputs" / "fuzz")
    parser.add_argument("--keep", action="store_true", help="only minimise into the corpus")
    args = parser.parse_args()
    work = args.work / args.target
    work.mkdir(parents=True, exist_ok=True)
    (CORPUS / args.target).mkdir(parents=True, exist_ok=True)
    if args.keep:
        print(f"{keep(args.target, work)} files reach branches that the corpus did not")
        return 0
    said = fuzz(
        args.target,
        f"-max_total_time={args.seconds}",
        f"-max_len={MOST_BYTES}",
        "-timeout=30",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={work}/",
        str(work),
        str(CORPUS / args.target),
    )
    crashes = sorted(path.name for path in work.iterdir() if re.match(r"(crash|timeout|oom|leak)-", path.name))
    print(json.dumps({"target": args.target, "seconds": args.seconds, **figures(said), "found": crashes}))
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
