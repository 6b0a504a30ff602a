"""Does a method find errors? On real, labelled ones, and on tasks whose exact credit is known, beside its own shuffled control.

    python -m bench --labelled FILE --model NAME   real errors: a table of all methods (--model smollm2: in a package)
    python -m bench my_method --quick              two tasks of arithmetic with exact credit, fewer problems
    python -m bench my_method --train --seeds 8    trains it, uniform and its shuffled control: hours
    python -m bench convert FORMAT IN OUT          labelled files of processbench, champ, bigbench_mistake, prm800k
    python -m bench sample QUESTIONS OUT --model NAME   the model's own errors: the first false written equation
    python -m bench compare A.json B.json          two results on the same responses, paired

A method is NAME or NAME:option=value,option=value, registered by any installed package. A run that ended early resumes. It
writes index.html, bench.csv and results.json.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

try:
    from bench import convert, labelled, on_policy, page, results, train, work
except ModuleNotFoundError as error:
    raise SystemExit(f"bench: {error}; run `pip install -e '.[bench]' -e packages/verl-cpu` in the clone") from error

ROOT = Path(__file__).parents[1]
COMMANDS = {"convert": convert.main, "sample": on_policy.main}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: with a message for what the user can fix.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["compare"]:
            if len(given) != 3:
                raise ValueError("write python -m bench compare A.json B.json")
            print(results.compare(Path(given[1]), Path(given[2])))
        elif given and given[0] in COMMANDS:
            COMMANDS[given[0]](given[1:])
        else:
            paths = _measure(given)
            print(*(f"written: {path}" for path in paths), sep="\n", file=sys.stderr)
    except ValueError as error:
        raise SystemExit(f"bench: {error}") from error


def _measure(arguments: Sequence[str]) -> list[Path]:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=layout)
    parser.add_argument("methods", nargs="*", help="all registered ones if none is given")
    parser.add_argument("--quick", action="store_true", help="fewer problems; over 10 minutes on two cores")
    parser.add_argument("--seeds", type=int, default=1, help="models of each task, each with errors of its own")
    parser.add_argument(
        "--processes", type=int, default=2, help="jobs at a time, each on one thread (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "outputs" / "bench",
        help="folder of rows, models and pages; default: outputs/bench",
    )
    parser.add_argument("--write", type=Path, help="a page whose markers bench or labelled take the tables")
    group = parser.add_argument_group("real errors")
    named = "solutions with their first error as JSON lines; may be repeated"
    group.add_argument("--labelled", type=Path, action="append", metavar="FILE", help=named)
    group.add_argument("--solutions", type=int, help="most solutions of each file, drawn at random")
    group.add_argument("--hours", type=float, default=math.inf, help="most processor hours; the same command resumes")
    labelled.add_model(group)
    train.add_options(parser)
    options = parser.parse_args(arguments)
    if options.train:
        return train.run(options)
    settings, files = work.QUICK if options.quick else work.Settings(), []
    if options.solutions is not None:
        settings = replace(settings, solutions=options.solutions)
    if options.labelled:
        model = labelled.model_of(options, "--labelled")
        files = [work.Labelled(path.stem, labelled.read(path, settings.solutions), model) for path in options.labelled]
        if len({file.name for file in files}) < len(files):
            raise ValueError("--labelled: give the files different names; a name is a task of the page")
        labelled.load(model)  # refuse what cannot be loaded at once
    sizes = {"seeds": options.seeds, "processes": options.processes, "hours": options.hours}
    result = work.run(options.methods, options.out, settings, files=files, **sizes)
    return page.write(result, options.out, options.write)


if __name__ == "__main__":
    main()
