"""``python -m grail_advantage.report RUN``: a run's report, one HTML file that needs no network. docs/report.md reads it.

``--summary`` prints the run's metrics here instead, and ``--figure methods`` draws a rollout for a paper.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

from grail_advantage.receipt.foreign import complain, say, visible
from grail_advantage.view.page import CURVES, MEGABYTES, ROLLOUTS, write_report
from grail_advantage.view.run import Run, find_response, open_run

LATEST = 10  # steps of the last mean of ``--summary``


def main(argv: list[str] | None = None) -> int:
    """Write the report and print its path; 1 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.report", description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="a run's folder or its file of metrics, of verl or TRL; or a token dump's folder")
    add("--output", type=Path, help="default: RUN/report.html, RUN/report_against_RUN2.html, RUN/methods.pdf")
    add("--against", type=Path, nargs="+", default=[], metavar="RUN2", help="other runs, drawn beside the first")
    add("--rollouts", type=int, default=ROLLOUTS, help="rollouts in the file at most; default: %(default)s")
    add("--megabytes", type=float, default=MEGABYTES, help="size of the file at most; default: %(default)g")
    add("--figure", choices=["methods"], help="draw one rollout under each method, as .pdf, .svg or .png")
    add("--step", type=int, help="of --figure; default: the last of the dump")
    add("--row", type=int, help="of --figure, in the step's batch; default: the first with scores")
    add("--width", type=float, default=6.75, help="of --figure, in inches; default: %(default)g")
    add("--summary", action="store_true", help="print the run's metrics here, and write nothing")
    args = parser.parse_args(argv)
    try:
        if args.summary:
            say(*summary(open_run(args.run)))
        elif args.figure:
            from grail_advantage.view.figure import write_figure

            run = open_run(args.run)
            path = args.output or run.folder / "methods.pdf"
            write_figure(*find_response(run, args.step, args.row), path, args.width)
            say(str(path.resolve()))
        else:
            limits = {"rollouts": args.rollouts, "megabytes": args.megabytes}
            say(str(write_report(args.run, args.output, against=args.against, **limits).resolve()))
    except ModuleNotFoundError as error:
        extra = "figures" if str(error.name).startswith("matplotlib") else "report"
        complain("report", f"{error}; run `pip install 'grail-advantage[{extra}]'`")
        return 1
    except (ValueError, OSError) as error:
        complain("report", str(error))
        return 1
    return 0


def summary(run: Run) -> Iterator[str]:
    """Lines with the first and last value of each metric that the page draws, and the mean of the last :data:`LATEST`.
    ValueError: the run has logged no step."""
    if not run.metrics:
        raise ValueError(f"{run.folder} has no metrics yet")
    seconds = [value for name in ("timing_s/step", "step_time") for value in run.metrics.get(name, {}).values()]
    each = f", {median(seconds):.1f} s each (median)" if seconds else ""
    yield f"{run.folder}: {len(seconds)} training steps{each}"
    patterns = "|".join(f"({pattern})" for own in CURVES.values() for pattern in own)
    names = [name for name in run.metrics if re.fullmatch(patterns, name)]
    width = max([0, *map(len, names)])
    yield "  " + " " * width + "".join(f"{head:>12}" for head in ("steps", "first", "last", f"mean of {LATEST}"))
    for name in names:
        points = run.metrics[name]
        values = list(points.values())
        figures = (values[0], values[-1], fmean(values[-LATEST:]))
        cells = [f"{min(points)} to {max(points)}", *(f"{value:.3f}" for value in figures)]
        yield f"  {visible(name, breaks=False):<{width}}" + "".join(f"{cell:>12}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
