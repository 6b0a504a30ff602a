"""ProcessBench's labelled solutions as lines of :mod:`grail_advantage.analyze`.

``python -m bench convert processbench gsm8k.jsonl out.jsonl`` reads Qwen/ProcessBench of the hub (arXiv 2412.06559), a
record a line. It keeps errors and controls (:mod:`bench.table`) with a boxed answer, and counts the others. Their order is
drawn at random once, so that any beginning is a sample.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.table import USED, sort_of
from grail_advantage.analyze.lines import SEPARATOR, json_lines
from grail_advantage.answers.format import BOXED
from grail_advantage.dump import write_whole

BOX = " Please reason step by step, and put your final answer within \\boxed{}."


def line_of(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Whether the bench can use a record, and as what, with its line; ``label`` is the first wrong step, -1 for none."""
    has_error = record["label"] >= 0
    is_correct = bool(record["final_answer_correct"])
    line = {
        "id": record["id"],
        "prompt": [{"role": "user", "content": record["problem"] + BOX}],
        "steps": record["steps"],
        "error": record["label"] if has_error else None,
        "reward": float(is_correct),
    }
    # Methods that take gradients of the answer would have no scores without one.
    has_answer = any(True for _ in BOXED.find(SEPARATOR.join(record["steps"]).encode()))
    return sort_of(is_correct, has_error, has_answer), line


def main(arguments: Sequence[str]) -> None:
    """``python -m bench convert processbench IN OUT``; ValueError for a file that is not of the format."""
    if len(arguments) != 3 or arguments[0] != "processbench":
        raise ValueError("convert reads ProcessBench: python -m bench convert processbench IN OUT")
    source, out = map(Path, arguments[1:])
    try:
        lines = [line_of(record) for _, record in json_lines(source)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: is not of the format processbench ({error!r})") from error
    usable = [json.dumps(line, ensure_ascii=False) for sort, line in lines if sort in USED]
    random.Random(0).shuffle(usable)
    write_whole(out, "\n".join([*usable, ""]))
    counts = Counter(sort for sort, _ in lines)
    print(f"{out}: {', '.join(f'{count} {sort}' for sort, count in counts.items())}")
