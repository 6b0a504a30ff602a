"""Labelled solutions of others as lines of :mod:`grail_advantage.analyze`.

``python -m bench convert processbench gsm8k.jsonl out.jsonl`` keeps errors and controls (:mod:`bench.table`) that have an
answer in the format, and counts the others. Their order is drawn at random once, so that any beginning is a sample. Formats:

- ``processbench``: Qwen/ProcessBench of the hub (arXiv 2412.06559), a record a line.
- ``bigbench_mistake``: a task of WHGTyen/BIG-Bench-Mistake (arXiv 2311.08516).
- ``champ``: ``dataset_files/v0.json`` of the package champ-dataset (arXiv 2406.18321). It does not say whether an answer is
  correct: a solution without a mistake counts as correct, another one as incorrect.
- ``prm800k``: openai/prm800k, phase 2 (arXiv 2305.20050). An answer is correct if it is spelled as the true one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grail_advantage.analyze.lines import SEPARATOR, json_lines
from grail_advantage.answers.format import answer_format
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


def bigbench_mistake(path: Path) -> Iterator[Line]:
    """``mistake_index`` is the first wrong step, null for none; answers are letters, with or without brackets, or numbers."""
    for number, record in json_lines(path):
        yield {
            "id": str(number),
            "prompt": asked(record["input"]),
            "steps": record["steps"],
            "error": record["mistake_index"],
            "reward": float(record["answer"].strip("() ") == record["target"].strip("() ")),
            "ground_truth": record["target"],
        }


def champ(path: Path) -> Iterator[Line]:
    """``fws_annotations`` have the first wrong step by characters; the conversation before the solution is the prompt."""
    for name, problem in json.loads(path.read_text(encoding="utf-8"))["problems"].items():
        for key, entry in (problem["fws_annotations"] or {}).items():
            prompt: list[dict[str, str]] = []
            for message in problem["conversations"].get(key, {"messages": []})["messages"]:
                if message["text"] == entry["text"]:
                    break
                role = "assistant" if message["role"].startswith("Model") else message["role"].lower()
                prompt.append({"role": role, "content": message["text"]})
            yield {
                "id": f"{name} {key}",
                "group": name,
                "prompt": prompt or asked(problem["_text"]),
                "response": entry["text"],
                "error": None if entry["start_idx"] is None else [entry["start_idx"], entry["end_idx"]],
                "reward": float(entry["start_idx"] is None),
            }


def prm800k(path: Path) -> Iterator[Line]:
    """Labelling ended at the first step whose rating is -1; the solution goes on in ``pre_generated_steps``."""
    for number, record in json_lines(path):
        question, label = record["question"], record["label"]
        steps = question.get("pre_generated_steps")
        ended = label["finish_reason"] in ("found_error", "solution")
        if not steps or not ended or record["is_quality_control_question"]:
            continue
        rated = [{one["text"]: one["rating"] for one in step["completions"] or ()} for step in label["steps"]]
        ratings = [of.get(step) for step, of in zip(steps, rated, strict=False)]
        error = ratings.index(-1) if -1 in ratings else None
        if (error is None) != (label["finish_reason"] == "solution"):
            continue
        yield {
            "id": str(number),
            "prompt": asked(question["problem"]),
            "steps": steps,
            "error": error,
            "reward": float(question["pre_generated_answer"] == question["ground_truth_answer"]),
            "ground_truth": question["ground_truth_answer"],
        }


# With the format of the answers; empty for none.
FORMATS: dict[str, tuple[Callable[[Path], Iterator[Line]], str]] = {
    "processbench": (processbench, "boxed"),
    "bigbench_mistake": (bigbench_mistake, r"[Tt]he answer is:? *(?P<content>[^\n]+)"),
    "champ": (champ, ""),
    "prm800k": (prm800k, r"# Answer\s+(?P<content>[^\n]+)"),
}


def sort_of(line: Line, answer: str) -> str:
    """What a line is for the bench."""
    text = line.get("response") or SEPARATOR.join(line["steps"])
    if answer and next(answer_format(answer).find(text.encode()), None) is None:
        return "without an answer"
    if (line["error"] is None) != (line["reward"] > 0):
        return "incorrect, no first error known" if line["error"] is None else "correct in spite of an error"
    return "controls" if line["error"] is None else "errors"


def main(arguments: Sequence[str]) -> None:
    """``python -m bench convert FORMAT IN OUT``; ValueError for a file that is not of the format."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench convert", description=__doc__, formatter_class=layout)
    parser.add_argument("format", choices=FORMATS)
    for name in ("file", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args(arguments)
    convert, answer = FORMATS[options.format]
    try:
        lines = [(sort_of(line, answer), line) for line in convert(options.file)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{options.file}: is not of the format {options.format} ({error!r})") from error
    kept = [json.dumps(line, ensure_ascii=False) for sort, line in lines if sort in ("errors", "controls")]
    random.Random(0).shuffle(kept)
    write_whole(options.out, "\n".join([*kept, ""]))
    print(
        f"{options.out}: {', '.join(f'{count} {sort}' for sort, count in Counter(sort for sort, _ in lines).items())}"
    )
    print(f"analyze it with --answer '{answer}'" * bool(answer))
