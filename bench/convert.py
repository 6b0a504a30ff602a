"""ProcessBench's labelled solutions as lines of :mod:`grail_advantage.analyze`.

``python -m bench convert processbench gsm8k.jsonl out.jsonl`` reads Qwen/ProcessBench of the hub (arXiv 2412.06559), a
record a line. It keeps errors and controls (:mod:`bench.table`) with a boxed answer, and counts the others. Their order is
drawn at random once, so that any beginning is a sample.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grail_advantage.analyze.lines import SEPARATOR, json_lines
from grail_advantage.answers.format import BOXED
from grail_advantage.dump import write_whole

BOX = " Please reason step by step, and put your final answer within \\boxed{}."
Line = dict[str, Any]


def asked(text: str) -> list[dict[str, str]]:
    """A question as messages."""
    return [{"role": "user", "content": text}]


def processbench(path: Path) -> Iterator[Line]:
    """``label`` is the first wrong step, -1 for none."""
    for _, record in json_lines(path):
        yield {
            "id": record["id"],
            "prompt": asked(record["problem"] + BOX),
            "steps": record["steps"],
            "error": None if record["label"] < 0 else record["label"],
            "reward": float(record["final_answer_correct"]),
        }


def sort_of(line: Line) -> str:
    """Whether the bench can use a line, and as what."""
    text = SEPARATOR.join(line["steps"])
    if next(BOXED.find(text.encode()), None) is None:
        return "without an answer"
    has_error = line["error"] is not None
    if has_error and line["reward"] > 0:
        return "correct in spite of an error"
    if not has_error and not line["reward"] > 0:
        return "incorrect, no first error known"
    return "errors" if has_error else "controls"


def main(arguments: Sequence[str]) -> None:
    """``python -m bench convert processbench IN OUT``; ValueError for a file that is not of the format."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench convert", description=__doc__, formatter_class=layout)
    parser.add_argument("format", choices=["processbench"])
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    try:
        lines = [(sort_of(line), line) for line in processbench(options.file)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{options.file}: is not of the format {options.format} ({error!r})") from error
    usable = [json.dumps(line, ensure_ascii=False) for sort, line in lines if sort in ("errors", "controls")]
    random.Random(0).shuffle(usable)
    write_whole(options.out, "\n".join([*usable, ""]))
    counts = Counter(sort for sort, _ in lines)
    print(f"{options.out}: {', '.join(f'{count} {sort}' for sort, count in counts.items())}")
