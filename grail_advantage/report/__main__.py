"""``python -m grail_advantage.report RUN``: a run's report, one HTML file that needs no network. docs/report.md reads it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grail_advantage.report.page import MEGABYTES, REPORT, ROLLOUTS, write_report


def main(argv: list[str] | None = None) -> int:
    """Write the report and print its path; 1 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (metrics.jsonl, tokens/), or a token dump's")
    parser.add_argument("--output", type=Path, help=f"the file; default: RUN/{REPORT}")
    parser.add_argument("--against", type=Path, metavar="RUN2", help="a second run, drawn beside the first")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="rollouts in the file at most; default: %(default)s")
    parser.add_argument(
        "--megabytes", type=float, default=MEGABYTES, help="size of the file at most, to which values are rounded; default: %(default)g"
    )
    args = parser.parse_args(argv)
    try:
        path = write_report(
            args.run, args.output, against=args.against, rollouts=args.rollouts, megabytes=args.megabytes
        )
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(path.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
