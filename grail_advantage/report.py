"""``python -m grail_advantage.report RUN``: a run's report, one HTML file that needs no network; docs/report.md reads
it."""

import argparse
import sys
from pathlib import Path

from grail_advantage.text_io import complain, say
from grail_advantage.view import MEGABYTES, ROLLOUTS


def main(argv: list[str] | None = None) -> int:
    """Write the report and print its path; 1 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.report", description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="a run's folder or its file of metrics; or a token dump's folder")
    add(
        "--output",
        type=Path,
        help="default: RUN/report.html, RUN/report_against_RUN2.html, RUN/methods.pdf",
    )
    add(
        "--against",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN2",
        help="other runs, drawn beside the first",
    )
    add(
        "--rollouts",
        type=int,
        default=ROLLOUTS,
        help="rollouts in the file at most; default: %(default)s",
    )
    add(
        "--megabytes",
        type=float,
        default=MEGABYTES,
        help="size of the file at most; default: %(default)g",
    )
    add(
        "--figure",
        choices=["methods"],
        help="draw one rollout under each method, as .pdf, .svg or .png",
    )
    add("--step", type=int, help="of --figure; default: the last of the dump")
    add("--row", type=int, help="of --figure, in the step's batch; default: the first with scores")
    add("--width", type=float, default=6.75, help="of --figure, in inches; default: %(default)g")
    args = parser.parse_args(argv)
    try:
        # Not above: --help need not wait for torch, and the message names the extra of a package that is missing.
        from grail_advantage.view.page import write_report
        from grail_advantage.view.run import open_run

        if args.figure:
            from grail_advantage.view.figure import write_figure

            run = open_run(args.run)
            path = args.output or run.folder / "methods.pdf"
            write_figure(run, args.step, args.row, path, args.width)
        else:
            path = write_report(
                args.run,
                args.output,
                against=args.against,
                rollouts=args.rollouts,
                megabytes=args.megabytes,
            )
        say(str(path.resolve()))
    except ModuleNotFoundError as error:
        extra = "figures" if str(error.name).startswith("matplotlib") else "report"
        complain("report", f"{error}; run `pip install 'grail-advantage[{extra}]'`")
        return 1
    except (ValueError, OSError) as error:
        complain("report", str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
