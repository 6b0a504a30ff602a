"""``python -m study.localisation``: token weights of labelled solutions, and how well they find the wrong step.

    python -m study.localisation --model MODEL --steps FILE.jsonl --method grail --method oar_g --twins --out steps

``--steps`` takes labelled solutions and writes ``steps/localisation/``: a page, CSV, JSON and a plot.
docs/localisation/README.md has the formats and figures.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from grail_advantage import __version__
from grail_advantage.analyze import add_options, tokenizer_of, weigh
from grail_advantage.view.dump.files import read_dump
from study.localisation.measure import localise
from study.localisation.report import write_report
from study.localisation.solutions import Solution, read_solutions


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: with a message for everything that the user can fix.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="study.localisation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=Path,
        metavar="FILE.jsonl",
        required=True,
        help="labelled solutions: ProcessBench (problem, steps, label), or GSM8K (question, answer), where one result of each "
        "solution is changed, with all later results",
    )
    parser.add_argument(
        "--twins",
        action="store_true",
        help="also weigh the right solution that each edited one was made of: what a method finds there is not the error",
    )
    add_options(parser)
    options = parser.parse_args(given)
    try:
        solutions, left_out = _labelled(options)
        tokenizer = tokenizer_of(options.model)
        for reason, count in left_out.items():
            print(f"  left out, {count} of the file: {reason}", file=sys.stderr)
        responses = [solution.as_response(chat=bool(tokenizer.chat_template)) for solution in solutions]
        # Every row counts as wrong, so that gates for wrong rows are open.
        outcome = weigh(options, responses, tokenizer, "wrong")
        result = localise(list(read_dump(outcome.path.parent)), options.seed)
    except ValueError as error:
        raise SystemExit(f"localisation: {error}") from error
    digest = hashlib.sha256(options.steps.read_bytes()).hexdigest()[:16]
    versions = [f"grail_advantage {__version__}", *(f"{name} {version(name)}" for name in ("torch", "transformers"))]
    about = {
        "model": options.model,
        "solutions": f"{options.steps.name} (SHA-256 {digest}...)",
        "command": f"python -m study.localisation {shlex.join(given)}",
        "versions": ", ".join(versions),
    }
    paths = write_report(result, options.out / "localisation", about)
    print(paths[0].read_text(encoding="utf-8"))
    print(f"written: {', '.join(path.name for path in paths)} in {paths[0].parent}")


def _labelled(options: argparse.Namespace) -> tuple[list[Solution], dict[str, int]]:
    read = read_solutions(options.steps, seed=options.seed, twins=options.twins)
    wrong = [solution for solution in read.solutions if solution.label >= 0]
    left_out = dict(read.left_out)
    if len(wrong) < len(read.solutions):
        left_out["no wrong step"] = len(read.solutions) - len(wrong)
    if not wrong:
        raise ValueError(f"{options.steps}: holds no solution with a wrong step")
    problems = list(dict.fromkeys(solution.id for solution in wrong))
    if options.limit is not None and options.limit < len(problems):
        kept = set(random.Random(options.seed).sample(problems, options.limit))
        wrong = [solution for solution in wrong if solution.id in kept]
    return wrong, left_out


if __name__ == "__main__":
    main()
