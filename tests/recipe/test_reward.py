"""The verifier: what it accepts, what it refuses, and what has no verdict."""

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
from grail_advantage.reward._normal import RULES, normal
from recipe.data.specs import SPECS, convert

DATA = Path(
    os.environ.get(
        "GRAIL_DATA_DIR", Path(__file__).resolve().parents[3] / "shared" / "data"
    )
)
HERE = Path(__file__).parent
KEYS = {
    "score": float,
    "acc": float,
    "answer_found": float,
    "verify_failed": float,
    "pred": str,
}
VERDICTS = {"right": 1.0, "wrong": 0.0, "unread": None}
# A ground truth, a box and the score; None: 0, without a verdict.
Case = tuple[Any, str, float | None]


def judge(gold, answer: str) -> dict[str, Any]:
    result = reward.compute_score(
        "test", f"Some reasoning.\nSo the answer is $\\boxed{{{answer}}}$.", gold
    )
    assert {key: type(value) for key, value in result.items()} == KEYS
    assert result["score"] == result["acc"]
    assert result["score"] in (0.0, 1.0)
    return result


def accepts(gold, answer: str) -> bool:
    result = judge(gold, answer)
    assert result["verify_failed"] == 0.0
    return result["score"] == 1.0


def misjudged(cases: list[Case]) -> list[Case]:
    """Those cases whose score is another; one that is to have no verdict may not have any."""

    def is_misjudged(case):
        gold, box, score = case
        result = judge(gold, box)
        return result["score"] != (score or 0.0) or result["verify_failed"] < (
            score is None
        )

    with ThreadPoolExecutor(8) as executor:
        return list(itertools.compress(cases, executor.map(is_misjudged, cases)))


def json_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        pytest.skip(f"{file} is missing; set GRAIL_DATA_DIR to the folder that holds it")
    return [json.loads(line) for line in file.read_text().splitlines()]


def cases_of(row: dict[str, Any]) -> list[Case]:
    return [
        (row["gold"], box, VERDICTS[key]) for key in VERDICTS for box in row.get(key, ())
    ]


def test_the_last_complete_box_counts():
    for text, answer in {
        "": None, r"\boxed{5": None, r"\boxed{}": "", r"first \boxed{4}, then \boxed{5}. Done": "5",
        r"\boxed{5} and \boxed{6": "5", r"\boxed{\boxed{5}}": r"\boxed{5}", "é\\boxed{π\ud800}": "π\ud800",
    }.items():  # fmt: skip
        assert reward.last_boxed(text) == answer
    expected = {
        "5": (0.0, 0.0, ""),
        r"\boxed{}": (0.0, 1.0, ""),
        r"\boxed{ $6.$ }": (0.0, 1.0, "6"),
        r"\boxed{5}": (1.0, 1.0, "5"),
    }
    for text, (score, answer_found, pred) in expected.items():
        result = reward.compute_score("gsm8k", text, "5")
        assert [*result.values()] == [score, score, answer_found, 0.0, pred]
    assert reward.compute_score("", None, "5")["score"] == 0.0
    result = judge("5", "a\ud800\x00\n" + "b" * 5000)
    assert len(result["pred"]) <= 128
    assert result["pred"].startswith("a\ufffd\ufffd b")
    json.dumps(result, ensure_ascii=False).encode("utf-8")


def test_the_table_of_verdicts():
    """Twenty or more of each kind that was once judged wrongly somewhere; the JSON lines have the ground truths, and
    boxes that math-verify alone would read in part."""
    rows = json_lines(HERE / "verdicts.jsonl")
    assert misjudged([case for row in rows for case in cases_of(row)]) == []
    assert min(Counter(row["kind"] for row in rows for _ in cases_of(row)).values()) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "count"), [(0, 402), pytest.param(1, 399, marks=pytest.mark.nightly)]
)
def test_random_answers_and_the_same_changed_in_one_place(half, count):
    """240 expressions in ten styles, whose values were compared at two points modulo a prime in which -1 has a root, and
    150 numbers, lists, sets and tuples of fractions: no judge computed what is right. The normal form is its own."""
    rows = json_lines(HERE / "verdict_properties.jsonl")[half::2]
    cases = [case for row in rows for case in cases_of(row)]
    assert len(cases) == count
    assert misjudged(cases) == []
    for text in {text for gold, box, _ in cases for text in map(normal, (gold, box))}:
        assert normal(text) == text


def test_each_rule_is_needed_for_its_example():
    for rule in RULES:
        example = text = rule[0]
        for applied in RULES:
            if applied is not rule:
                text = applied[1].sub(applied[2], text)
        assert (
            " ".join(text.split()) != normal(example) == normal(normal(example)) != example
        ), example


@pytest.mark.slow
def test_answers_of_public_bug_reports():
    pairs = []
    for case in json_lines(DATA / "answer_cases.jsonl"):
        if case["input"].keys() == {"gold", "box"}:
            pairs.append(
                (case["input"]["gold"], case["input"]["box"], float(case["right"]))
            )
    assert misjudged(pairs) == []


@pytest.mark.slow
def test_number_path_agrees_with_math_verify():
    """Numbers are compared without math-verify; it has to say the same, also of a rounded copy of the ground truth."""
    rng = random.Random(0)
    for digits in [None, 3, 5, 6, 9] * 8:
        integer = str(rng.randint(-(10**9), 10**9))
        decimal = f"{rng.randint(-999, 999)}.{rng.randint(0, 999):03d}"
        for gold, second in itertools.permutations((integer, decimal)):
            answer = second if digits is None else f"{float(gold):.{digits}f}"
            verdict = _verify_pool.verify(gold, answer)
            assert reward._same_value(gold, answer) == verdict, (gold, answer)


SAMPLES = ("college_math_sample5", "minerva_math_sample5", "olympiadbench_sample5")


@pytest.mark.parametrize("name", ["gsm8k_test", "aime24", "amc23", *SAMPLES])
def test_gold_answers_accept_themselves(name):
    spec = SPECS[name.removesuffix("_test").removesuffix("_sample5")]
    rows = [convert(spec, row) for row in json_lines(DATA / f"{name}.jsonl")]
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    assert len(golds) >= 5
    assert misjudged([(gold, gold, 1.0) for gold in golds]) == []
