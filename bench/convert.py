"""Labelled solutions of others as lines of :mod:`bench.labelled`.

``python -m bench convert processbench gsm8k.jsonl out.jsonl``; formats:

- ``processbench``: Qwen/ProcessBench of the hub (arXiv 2412.06559), a record a line.
- ``bigbench_mistake``: a task of WHGTyen/BIG-Bench-Mistake (arXiv 2311.08516).
- ``champ``: ``dataset_files/v0.json`` of the package champ-dataset (arXiv 2406.18321). It does not say whether an answer is
  correct: a solution without a mistake counts as correct, another one as incorrect.
- ``prm800k``: openai/prm800k, phase 2 (arXiv 2305.20050). An answer is correct if it is spelled as the true one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grail_advantage.dump import write_whole
from grail_advantage.view.analysis.responses import json_lines

BOX = " Please reason step by step, and put your final answer within \\boxed{}."
Line = dict[str, Any]


def processbench(path: Path) -> Iterator[Line]:
    """``label`` is the first wrong step, -1 for none."""
    for _, record in json_lines(path):
        yield {
            "id": record["id"],
            "prompt": record["problem"] + BOX,
            "steps": record["steps"],
            "error": None if record["label"] < 0 else record["label"],
            "correct": record["final_answer_correct"],
            "source": record["generator"],
        }


def bigbench_mistake(path: Path) -> Iterator[Line]:
    """``mistake_index`` is the first wrong step, null for none; answers are letters, with or without brackets, or numbers."""
    for number, record in json_lines(path):
        yield {
            "id": str(number),
            "prompt": record["input"],
            "steps": record["steps"],
            "error": record["mistake_index"],
            "correct": record["answer"].strip("() ") == record["target"].strip("() "),
            "source": "PaLM 2",
            "ground_truth": record["target"],
            "answer": r"[Tt]he answer is:? *(?P<content>[^\n]+)",
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
                "problem": name,
                "prompt": prompt or problem["_text"],
                "text": entry["text"],
                "error": None if entry["start_idx"] is None else [entry["start_idx"], entry["end_idx"]],
                "correct": entry["start_idx"] is None,
                "source": entry["author"],
                "answer": "",
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
            "prompt": question["problem"],
            "steps": steps,
            "error": error,
            "correct": question["pre_generated_answer"] == question["ground_truth_answer"],
            "source": "PRM800K's generator",
            "ground_truth": question["ground_truth_answer"],
            "answer": r"# Answer\s+(?P<content>[^\n]+)",
        }


FORMATS: dict[str, Callable[[Path], Iterator[Line]]] = {
    one.__name__: one for one in (processbench, bigbench_mistake, champ, prm800k)
}


def main(arguments: Sequence[str]) -> None:
    """``python -m bench convert FORMAT IN OUT``; ValueError for a file that is not of the format."""
    parser = argparse.ArgumentParser(
        prog="python -m bench convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    try:
        lines = [json.dumps(line, ensure_ascii=False) for line in FORMATS[options.format](options.file)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{options.file}: is not of the format {options.format} ({error!r})") from error
    write_whole(options.out, "\n".join([*lines, ""]))
    print(f"{options.out}: {len(lines)} solutions")
