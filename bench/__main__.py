"""Does a method find errors, or follow the policy's values? A table over a folder of ``analyze``, beside controls.

python -m grail_advantage.analyze FILE.jsonl --model NAME --method all --out FOLDER
python -m bench FOLDER                     each method's figures and verdict, as Markdown
python -m bench fit FOLDER OUT             the method fitted, by the values in a folder
python -m bench convert processbench IN OUT         ProcessBench's labelled solutions
python -m bench sample QUESTIONS OUT --model NAME   the model's own responses, by token ids
python -m bench values FILE OUT --model NAME        their steps' values, by continuations of the model
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from grail_advantage.dump import read_dump
from grail_advantage.text_io import say, visible

try:
    from bench import convert, credit, fit, sample, table, values
except ModuleNotFoundError as error:
    raise SystemExit(
        f"bench: {error}; run `pip install -e '.[bench]' -e packages/verl-cpu` in the clone"
    ) from error

COMMANDS = {"convert": convert, "fit": fit, "sample": sample, "values": values}


def report(folder: Path) -> str:
    """The tables of a folder: by values, by labels, or both."""
    names = {name for row in read_dump(folder) for name in row.labels}
    tables = []
    if "values" in names:
        tables.append(credit.report(folder))
    # Of a folder with neither, the table by labels says what is missing.
    if "steps" in names or not tables:
        tables.append(table.report(folder))
    return "\n\n".join(tables)


def main(words: Sequence[str]) -> None:
    """Run the command; SystemExit with a message for what the user can fix."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if words else 2)
    try:
        if words[0] in COMMANDS:
            COMMANDS[words[0]].main(words[1:])
        else:
            say(*report(Path(*words)).splitlines())
    except (ValueError, OSError) as error:
        raise SystemExit(visible(f"bench: {error}")) from error


if __name__ == "__main__":
    main(sys.argv[1:])
