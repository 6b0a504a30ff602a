"""Code that is read once: one assignment a line, plain ifs, nouns for names. ``python scripts/unfolded.py`` prints what is
to be unfolded in ROOMS, and ends with status 1 where there is anything."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Folders and files that hold it; one that is unfolded gets a line here.
ROOMS = (
    ":(glob)grail_advantage/*.py",
    ":(glob)tests/*.py",
    "bench",
    "benchmarks",
    "examples",
    "grail_advantage/analyze",
    "grail_advantage/answers",
    "grail_advantage/methods",
    "grail_advantage/model",
    "grail_advantage/receipt",
    "grail_advantage/reward",
    "grail_advantage/text_io",
    "grail_advantage/trl_ext",
    "grail_advantage/verl_ext",
    "grail_advantage/view",
    "packages",
    "recipe",
    "scripts",
    "tests/bench",
    "tests/benchmarks",
    "tests/core",
    "tests/other_hosts",
    "tests/recipe",
    "tests/run_life",
    "tests/trl_ext",
    "tests/verl_cpu",
    "tests/verl_ext",
    "tests/view/test_analyze.py",
    ":!grail_advantage/dump.py",  # an option is called `every`
    ":!grail_advantage/methods/sessions.py",  # a session's field and an argument are called `before`
    ":!grail_advantage/methods/turn_lists.py",
)
WORDS = re.compile(
    "of|found|there|known|own|one|said|made|some|here|alike|told|whole|others?|both|before|after|beside|each|every|left|taken"
    "|kept|shown|few|most|given|asked|wanted|so|such"
)


def remarks(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that is to be unfolded, and what takes its place."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                yield node, "one assignment a line"
            case ast.Starred(value=ast.Tuple() | ast.List(), ctx=ast.Load()):
                yield node, "the elements in place of a starred literal"
            case ast.AugAssign(op=ast.BitOr(), value=ast.Dict()):
                yield node, "`name[key] = value` in place of `|= {`"
            case ast.IfExp(body=ast.IfExp()) | ast.IfExp(orelse=ast.IfExp()):
                yield node, "an if statement in place of nested conditional expressions"
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) if WORDS.fullmatch(name):
                yield node, f"a noun in place of `{name}`"


def main() -> None:
    files = subprocess.check_output(["git", "ls-files", *ROOMS], text=True).split()
    lines = [
        f"{file}:{node.lineno}: {remark}"
        for file in files
        if file.endswith(".py")
        for node, remark in remarks(ast.parse(Path(file).read_text(encoding="utf-8")))
    ]
    sys.exit("\n".join(lines) if lines else None)


if __name__ == "__main__":
    main()
