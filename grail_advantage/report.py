"""``python -m grail_advantage.report RUN``: a run's report, one HTML file that needs no network. docs/report.md reads it.

``--summary`` prints the run's metrics here instead, and ``--terminal`` one rollout. ``--figure`` draws one for a paper.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grail_advantage.receipt.foreign import complain, say
from grail_advantage.view.page import data
from grail_advantage.view.page.page import MEGABYTES, REPORT, ROLLOUTS, write_page
from grail_advantage.view.summary import follow, summary


def main(argv: list[str] | None = None) -> int:
    """Write the report and print its path; 1 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.report", description=__doc__)
    parser.add_argument(
        "run", type=Path, help="a run's folder or its file of metrics, of verl or TRL; or a token dump's folder"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"the file; default: RUN/{REPORT}, RUN/report_against_RUN2.html, RUN/KIND.pdf",
    )
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
    parser.add_argument(
        "--figure",
        choices=("response", "methods", "positions", "received"),
        help="draw a response's weights, those of every method, means by place, or what was received, as SVG, PDF or PNG",
    )
    parser.add_argument("--step", type=int, help="of --terminal and --figure; default: the last")
    parser.add_argument(
        "--row", type=int, help="of --terminal and --figure, its place in the batch; default: the first with scores"
    )
    parser.add_argument(
        "--mark",
        type=_range,
        metavar="START:END",
        help="of --figure: characters of the response that are its incorrect step; default: those that the dump labels",
    )
    parser.add_argument("--width", type=float, default=6.75, help="of --figure, in inches; default: %(default)g")
    parser.add_argument("--summary", action="store_true", help="print the run's metrics here, and write nothing")
    parser.add_argument(
        "--follow", type=int, metavar="PID", help="of --summary: first each step until this process ends"
    )
    args = parser.parse_args(argv)
    try:
        if args.summary:
            for line in follow(args.run, args.follow) if args.follow else ():
                say(line)
            say(*summary(args.run))
            return 0
        if args.terminal:
            _show(args)
            return 0
        runs = [data.open_run(run) for run in (args.run, args.against) if run is not None]
        if args.figure:
            path = _draw(runs[0], args)
        else:
            path = write_page(runs, args.output, rollouts=args.rollouts, megabytes=args.megabytes)
    except ModuleNotFoundError as error:
        extra = "figures" if str(error.name).startswith("matplotlib") else "report"
        complain("report", f"{error}; run `pip install 'grail-advantage[{extra}]'`")
        return 1
    except (ValueError, OSError) as error:
        complain("report", str(error))
        return 1
    for run in runs:
        complain("report", *run.problems, *run.lacks)
    say(str(path.resolve()))
    return 0


def _show(args: argparse.Namespace) -> None:
    """Show a rollout, and print the unreadable parts of the run."""
    from grail_advantage.view.terminal import print_rollout

    run = data.open_run(args.run)
    if run.dump is None:
        raise ValueError(*run.lacks)
    print_rollout(run.dump, args.step, args.row)
    complain("report", *run.problems)


def _draw(run: data.Run, args: argparse.Namespace) -> Path:
    """Write a figure, and print what is missing in it."""
    from grail_advantage.view.figures import write_figure

    path = args.output or run.folder / f"{args.figure}.pdf"
    missing = write_figure(run, args.figure, path, width=args.width, step=args.step, row=args.row, mark=args.mark)
    if missing and path.suffix != ".svg":
        complain("report", f"no font has {missing}, drawn as boxes; a .svg leaves them to its viewer's fonts")
    return path


def _range(text: str) -> tuple[int, int]:
    try:
        start, end = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be START:END, as in 120:164") from None
    return start, end


if __name__ == "__main__":
    sys.exit(main())
