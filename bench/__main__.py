"""Does a method find anything? Places, agreement with exact credit and cost, beside its own shuffled control; and training.

    python -m bench grail my_method --quick        minutes on two cores; outputs/bench/index.html and bench.csv
    python -m bench --quick                        all registered methods
    python -m bench my_method --gsm8k FILE.jsonl   also on GSM8K solutions with one changed result (needs SmolLM2)
    python -m bench my_method --train --seeds 8    trains it, uniform and its shuffled control: hours

A method is NAME or NAME:option=value,option=value, registered by any installed package. A run that ended early resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import page, train, work

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: with a message for what the user can fix.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="all registered ones if none is given")
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer problems")
    parser.add_argument(
        "--seeds", type=int, default=1, help="models of each task; each has its own errors and problems"
    )
    parser.add_argument("--processes", type=int, default=2, help="jobs at a time, each on one thread")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench", help="folder of rows, models and pages")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test set as JSON lines of question and answer")
    parser.add_argument("--write", type=Path, help="a page whose markers take the tables; with --gsm8k that one alone")
    train.add_options(parser)
    options = parser.parse_args(arguments)
    try:
        if options.train:
            paths = train.run(options)
        else:
            settings = work.QUICK if options.quick else work.Settings()
            sizes = {"seeds": options.seeds, "processes": options.processes}
            rows = work.run(options.methods, options.out, settings, gsm8k=options.gsm8k, **sizes)
            paths = page.write(rows, options.out, settings, options.write)
    except ValueError as error:
        raise SystemExit(f"bench: {error}") from error
    print(*(f"written: {path}" for path in paths), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
