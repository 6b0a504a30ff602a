"""Failures of the reward function by kind, with math-verify alone beside it: ``python -m tests.answer_cases CASES.jsonl``.

A case is a JSON object with ``id``, ``kind``, ``input`` and ``right``. The input is a ground truth ``gold`` with a ``box`` or a
``text``, a ``text`` with an answer ``format``, or a ``row`` of examples/trl_grail.py with a ``box``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from math_verify import parse, verify

from grail_advantage.answers.format import answer_format
from grail_advantage.reward import compute_score


def verdict(case: dict[str, Any]) -> Any:
    """The project's value for a case, to be compared with its ``right``."""
    given = case["input"]
    if "format" in given:
        text = given["text"].encode()
        spans = list(answer_format(given["format"]).find(text))
        return text[slice(*spans[-1][1:3])].decode() if spans else None
    gold = trl_solution(given["row"]) if "row" in given else given["gold"]
    return int(compute_score("", given.get("text", f"\\boxed{{{given.get('box')}}}"), gold)["score"])


def trl_solution(row: dict[str, Any]) -> Any:
    """The ground truth that examples/trl_grail.py reads, without TRL."""
    file = Path(__file__).parents[1] / "examples" / "trl_grail.py"
    spec = importlib.util.spec_from_file_location("trl_grail", file)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {"trl": MagicMock(), "grail_advantage.trl_ext": MagicMock()}):
        spec.loader.exec_module(example)
    return example.problem(row)["solution"]


def math_verify_alone(case: dict[str, Any]) -> int | None:
    """math-verify's verdict, None where the case is no question for it."""
    given = case["input"]
    if "gold" not in given:
        return None
    golds = given["gold"] if isinstance(given["gold"], list) else [given["gold"]]
    gold = parse(f"\\boxed{{{', '.join(map(str, golds))}}}")
    return int(verify(gold, parse(given.get("text", f"\\boxed{{{given.get('box')}}}"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--list", action="store_true", help="print every failure of the project")
    parser.add_argument("--output", type=Path, help="write the verdicts, by case")
    parser.add_argument(
        "--alone", action="store_true", help="math-verify alone beside it; minutes for a thousand cases"
    )
    options = parser.parse_args()
    cases = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    with ThreadPoolExecutor(4) as executor:
        verdicts = list(executor.map(verdict, cases))
    columns = {"project": verdicts}
    if options.alone:
        columns["math-verify"] = [math_verify_alone(case) for case in cases]
    print(f"{'kind':36} cases" + "".join(f"  {name}: rewarded, refused" for name in columns))
    counts = {
        name: Counter(
            (kind, value == 1)
            for case, value in zip(cases, values, strict=True)
            if value != case["right"] and (name == "project" or value is not None)
            for kind in (case["kind"], "all")
        )
        for name, values in columns.items()
    }
    sizes = Counter(case["kind"] for case in cases) + Counter({"all": len(cases)})
    for kind in sorted(sizes, key=lambda kind: (kind == "all", kind)):
        failures = "".join(f"{count[kind, True]:>25}, {count[kind, False]:<6}" for count in counts.values())
        print(f"{kind:36} {sizes[kind]:5}{failures}")
    for case, value in zip(cases, verdicts, strict=True):
        if options.list and value != case["right"]:
            print(json.dumps({**case, "got": value}, ensure_ascii=False))
    if options.output:
        options.output.write_text(
            json.dumps({case["id"]: v for case, v in zip(cases, verdicts, strict=True)}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
