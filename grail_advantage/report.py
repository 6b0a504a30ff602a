"""``python -m grail_advantage.report RUN``: a run's report, one HTML file that needs no network. docs/report.md reads it.

``--summary`` prints the run's metrics here instead, and ``--terminal`` one rollout.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grail_advantage.dump.options import TOKENS
from grail_advantage.view.page import data
from grail_advantage.view.page.page import MEGABYTES, REPORT, ROLLOUTS, write_report
from grail_advantage.view.summary import follow, summary


def main(argv: list[str] | None = None) -> int:
    """Write the report and print its path; 1 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (metrics.jsonl, tokens/), or a token dump's")
    parser.add_argument("--output", type=Path, help=f"the file; default: RUN/{REPORT}")
    parser.add_argument("--against", type=Path, metavar="RUN2", help="a second run, drawn beside the first")
    parser.add_argument(
        "--rollouts", type=int, default=ROLLOUTS, help="rollouts in the file at most; default: %(default)s"
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=MEGABYTES,
        help="size of the file at most; larger ones get fewer rollouts; default: %(default)g",
    )
    parser.add_argument("--terminal", action="store_true", help="show one rollout here, and write nothing")
    parser.add_argument("--step", type=int, help="of --terminal; default: the last")
    parser.add_argument("--row", type=int, help="of --terminal, its place in the batch; default: the first with scores")
    parser.add_argument("--summary", action="store_true", help="print the run's metrics here, and write nothing")
    parser.add_argument(
        "--follow", type=int, metavar="PID", help="of --summary: first each step until this process ends"
    )
    args = parser.parse_args(argv)
    try:
        if args.summary:
            for line in follow(args.run, args.follow) if args.follow else ():
                print(line, flush=True)
            print(summary(args.run))
            return 0
        if args.terminal:
            _show(args)
            return 0
        path = write_report(
            args.run, args.output, against=args.against, rollouts=args.rollouts, megabytes=args.megabytes
        )
    except ModuleNotFoundError as error:
        print(f"report: {error}; run `pip install 'grail-advantage[report]'`", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(path.resolve())
    return 0


def _show(args: argparse.Namespace) -> None:
    """Show a rollout, and print the unreadable parts of the run."""
    from grail_advantage.view.terminal import print_rollout

    run = data.open_run(args.run)
    if run.dump is None:
        raise ValueError(f"{args.run} has no token dump ({TOKENS}/, algorithm.token_dump.folder)")
    print_rollout(run.dump, args.step, args.row)
    for problem in run.problems:
        print(f"report: {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
