"""``python -m grail_advantage.analyze``: token weights of existing responses by several methods, as a token dump.

A line has ``prompt`` (a text as the model saw it, or a list of messages for the chat template) and ``response`` (a text,
or the generated token ids) or ``steps`` (texts, which blank lines join; beside a ``response`` its parts), and may have
``reward``, ``ground_truth``, ``group`` and ``id``, and for the chat template ``tools`` and ``chat_template_kwargs``; if
the last message is the assistant's, the response continues it. With ``error`` it is labelled: the first incorrect step
from 0 (without ``steps``, lines with text are the steps), the half-open range ``[start, end]`` of its characters in the
response, or null for none. ``values`` are those of ``python -m bench values``. Other keys are columns that a method may
ask for.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from grail_advantage.answers.format import BOXED


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Its options are read before torch and transformers are imported, which takes seconds."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.analyze", description=__doc__)
    add = parser.add_argument
    kinds = "lines with prompt, response or steps, ... (docs/report.md), verl's STEP.jsonl, or TRL's completions_*.parquet"
    add("responses", type=Path, metavar="FILE", help=kinds)
    add(
        "--model",
        required=True,
        help="folder or name of a causal language model; packaged: tiny, smollm2",
    )
    add(
        "--after",
        help="a later checkpoint of --model: how it changed each token's log-probability, as effect",
    )
    add("--reference", help="the model of reference log-probabilities, for methods that read them")
    add(
        "--method",
        action="append",
        required=True,
        help="NAME[:option=value,...], again for more; all: that fit",
    )
    add(
        "--out",
        type=Path,
        default=Path("analysis"),
        help="folder for the results (default: %(default)s)",
    )
    add(
        "--import",
        dest="files",
        action="append",
        default=[],
        type=Path,
        help="a Python file that registers a method",
    )
    auto = "auto: from reward or ground_truth; wrong without these, and where lines are labelled (error)"
    add("--advantages", choices=("auto", "rewards", "wrong", "right"), default="auto", help=auto)
    add(
        "--answer",
        default=BOXED.name,
        help="boxed, hashes, tag, or an expression with (?P<content>...); empty: none",
    )
    add("--temperature", type=float, default=1.0, help="of the sampling (default: %(default)s)")
    add("--tokens", type=int, help="most of a forward pass, padding counted")
    add("--device", help="torch's name (default: cuda where there is one, else cpu)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the model",
    )
    options = parser.parse_args(arguments)
    from grail_advantage.analyze.command import run

    run(options)


if __name__ == "__main__":
    main()
