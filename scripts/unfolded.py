"""Code that is read once: one assignment a line, plain ifs, nouns for names. ``python scripts/unfolded.py`` prints what is
to be unfolded in ROOMS, and ends with status 1 where there is anything."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# All files, but for these.
ROOMS = (
    "*.py",
    # An option is called `every`
    ":!grail_advantage/dump.py",
    # A session's field and an argument are called `before`
    ":!grail_advantage/methods/sessions.py",
    ":!grail_advantage/methods/turn_lists.py",
    ":!tests/view/synthetic.py",
    ":!tests/view/test_[!a]*",
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
    lines = []
    for file in files:
        for node, remark in remarks(ast.parse(Path(file).read_text(encoding="utf-8"))):
            lines.append(f"{file}:{node.lineno}: {remark}")
    sys.exit("\n".join(lines) or None)


if __name__ == "__main__":
    main()
