"""The verifier: what it accepts, what it refuses, and what has no verdict."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grail_advantage import reward
from grail_advantage.reward import _verify_pool

DATA = Path(os.environ.get("GRAIL_DATA_DIR", Path(__file__).resolve().parents[3] / "shared" / "data"))
VERDICTS = Path(__file__).with_name("verdicts.jsonl")
KEYS = {"score": float, "acc": float, "answer_found": float, "verify_failed": float, "pred": str}


def judge(gold: Any, answer: str) -> dict[str, Any]:
    result = reward.compute_score("test", f"Some reasoning.\nSo the answer is $\\boxed{{{answer}}}$.", gold)
    assert {key: type(value) for key, value in result.items()} == KEYS
    assert result["score"] == result["acc"] and result["score"] in (0.0, 1.0)
    return result


def accepts(gold: Any, answer: str) -> bool:
    result = judge(gold, answer)
    assert result["verify_failed"] == 0.0
    return result["score"] == 1.0


def misjudged(cases: list[tuple[Any, str, float | None]]) -> list[tuple[Any, str, float | None]]:
    """Those that are not judged as they say; None: 0, without a verdict."""
    with ThreadPoolExecutor(8) as executor:
        results = zip(cases, executor.map(lambda case: judge(*case[:2]), cases), strict=True)
    return [
        case
        for case, given in results
        if given["score"] != (case[2] or 0) or given["verify_failed"] < (case[2] is None)
    ]


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        pytest.skip(f"{file} is missing; set GRAIL_DATA_DIR to the folder that holds it")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_last_complete_box_counts() -> None:
    for text, answer in {
        "": None, r"\boxed{5": None, r"\boxed{}": "", r"first \boxed{4}, then \boxed{5}. Done": "5",
        r"\boxed{5} and \boxed{6": "5", r"\boxed{\boxed{5}}": r"\boxed{5}", "é\\boxed{π\ud800}": "π\ud800",
    }.items():  # fmt: skip
        assert reward.last_boxed(text) == answer
    expected = {"5": (0.0, 0.0, ""), r"\boxed{}": (0.0, 1.0, ""), r"\boxed{ $6.$ }": (0.0, 1.0, "6")}
    for text, (score, answer_found, pred) in (expected | {r"\boxed{5}": (1.0, 1.0, "5")}).items():
        result = reward.compute_score("gsm8k", text, "5")
        assert result == dict(zip(KEYS, (score, score, answer_found, 0.0, pred), strict=True))
    assert reward.compute_score("", None, "5")["score"] == 0.0  # type: ignore[arg-type]
    result = judge("5", "a\ud800\x00\n" + "b" * 5000)
    assert len(result["pred"]) <= 128 and result["pred"].startswith("a\ufffd\ufffd b")
    json.dumps(result, ensure_ascii=False).encode("utf-8")


def test_the_table_of_verdicts() -> None:
    """Twenty or more of each kind that was once judged wrongly somewhere; the JSON lines have the ground truths, and
    boxes that math-verify alone would read in part."""
    rows, verdict_of = rows_of(VERDICTS), {"right": 1.0, "wrong": 0.0, "unread": None}
    cases = [(row["gold"], box, verdict_of[key]) for row in rows for key in verdict_of for box in row.get(key, ())]
    assert misjudged(cases) == []
    counts = Counter(row["kind"] for row in rows for key in verdict_of for _ in row.get(key, ()))
    assert min(counts.values()) >= 20


@pytest.mark.slow
def test_answers_of_public_bug_reports() -> None:
    cases = [(case["input"], case["right"]) for case in rows_of(DATA / "answer_cases.jsonl")]
    pairs = [(given["gold"], given["box"], float(right)) for given, right in cases if given.keys() == {"gold", "box"}]
    assert misjudged(pairs) == []


@pytest.mark.slow
def test_number_path_agrees_with_math_verify() -> None:
    """Numbers are compared without math-verify; it has to say the same, also of a rounded copy of the ground truth."""
    rng = random.Random(0)
    for digits in [None, 3, 5, 6, 9] * 8:
        whole, decimal = str(rng.randint(-(10**9), 10**9)), f"{rng.randint(-999, 999)}.{rng.randint(0, 999):03d}"
        for gold, other in itertools.permutations((whole, decimal)):
            answer = other if digits is None else f"{float(gold):.{digits}f}"
            assert reward._same_value(gold, answer) == _verify_pool.verify(gold, answer), (gold, answer)


GOLDS = {
    "gsm8k_test": lambda row: row["answer"].split("####")[1].strip(),
    "aime24": lambda row: row["answer"],
    "amc23": lambda row: row["answer"],
    "college_math_sample5": lambda row: row["answer"],
    "minerva_math_sample5": lambda row: reward.last_boxed(row["solution"]),
    "olympiadbench_sample5": lambda row: row["final_answer"],
}


@pytest.mark.parametrize("name", GOLDS)
def test_gold_answers_accept_themselves_and_no_other(name: str) -> None:
    golds = [GOLDS[name](row) for row in rows_of(DATA / f"{name}.jsonl")]
    texts = [gold[0] if isinstance(gold, list) else str(gold) for gold in golds]
    assert len(golds) >= 5 and [gold for gold, text in zip(golds, texts, strict=True) if not accepts(gold, text)] == []
    if name in ("aime24", "amc23"):
        pairs = [(a, b) for a, b in itertools.product(golds, texts) if float(a) != float(b)]
        assert len(pairs) > 500 and [pair for pair in pairs if accepts(*pair)] == []
