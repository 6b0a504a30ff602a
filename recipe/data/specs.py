"""The datasets: where each is, and how its rows become rows of verl's RLHF schema.

The published evaluation uses 200 problems of College-Math and 200 of OlympiadBench, which lie in its repository
(declare-lab/grail, ``src/eval/eval_data``). ``published_subsets.json`` has their ids and the first 16 hex digits of the
SHA-256 of their problem texts, by which they are found in the full sets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grail_advantage.reward import gold_text, last_boxed

_SUBSETS = Path(__file__).with_name("published_subsets.json")
PUBLISHED_SUBSETS: Mapping[str, Mapping[str, str]] = json.loads(_SUBSETS.read_text(encoding="utf-8"))
"""For each of the sets with a subset: the published problems' ids, and the beginnings of their hashes."""
PROMPT_SUFFIX = r" Please reason step by step, and put your final answer within \boxed{}."
"""The instruction after every problem, in training and evaluation alike (arXiv 2606.04889, training set-up)."""
PUBLISHED_SUFFIX = PROMPT_SUFFIX.replace(r"\b", "\b")
"""As the published run's model read it: its code has a plain string, in which ``\\b`` is the character U+0008."""
PROMPTS = {"corrected": PROMPT_SUFFIX, "published": PUBLISHED_SUFFIX}


class DatasetSpec(NamedTuple):
    """One dataset. ``name`` is also the stem of the local file and of the output, and the rows' ``data_source``."""

    name: str
    hub: str  # ORG/DATASET[:CONFIG[:SPLIT]]
    rows: int  # of the published set
    problem: str = "problem"  # column with a text, or with a list of chat messages that is one of the user
    gold: str = "answer"  # column of the ground truth
    # plain: the column's value; boxed: the last complete box in its text; hashes: the text after ####
    reader: Literal["plain", "boxed", "hashes"] = "plain"
    ids: tuple[str, ...] = ("id",)  # columns whose values, joined by "/", name a row in its source
    split: Literal["train", "test"] = "test"
    # Rows with another value in one of these columns belong to another task; a source without the column passes.
    required: Mapping[str, str] = {}

    @property
    def own_split(self) -> str:
        """The name of the split on the hub; AIME's only one is called train."""
        return self.hub.partition("::")[2] or self.split


# Copies of the whole OlympiadBench also hold physics, Chinese, pictures and proofs.
_OLYMPIAD = {"subject": "Math", "language": "English", "modality": "Text-only", "question_type": "Open-ended"}
_BOOK = ("data_source", "question_number")  # exercise numbers repeat from book to book
_ALL = (
    DatasetSpec("math500", "HuggingFaceH4/MATH-500", 500, ids=("unique_id",)),
    DatasetSpec("aime24", "HuggingFaceH4/aime_2024::train", 30),
    DatasetSpec("amc23", "math-ai/amc23", 40),
    DatasetSpec("minerva_math", "svc-huggingface/minerva-math", 272, "problem", "solution", "boxed", ("idx",)),
    DatasetSpec("college_math", "realtreetune/college_math", 2_818, "question", ids=_BOOK),
    DatasetSpec("olympiadbench", "math-ai/olympiadbench", 675, "question", "final_answer", required=_OLYMPIAD),
    DatasetSpec("gsm8k", "openai/gsm8k:main", 1_319, "question", reader="hashes", ids=("idx",)),
    DatasetSpec("deepmath", "trl-lib/DeepMath-103K", 97_870, "prompt", "solution", split="train"),
    DatasetSpec("gsm8k_train", "openai/gsm8k:main", 7_473, "question", "answer", "hashes", ("idx",), "train"),
)
SPECS: Mapping[str, DatasetSpec] = {spec.name: spec for spec in _ALL}
BENCHMARKS = tuple(name for name, spec in SPECS.items() if spec.split == "test")
TRAINING_SETS = tuple(name for name, spec in SPECS.items() if spec.split == "train")
PUBLISHED_BENCHMARKS = BENCHMARKS[:6]
"""The six of the published evaluation; ``gsm8k`` is an extra one that has to be asked for by name."""


def benchmark_names(text: str) -> list[str]:
    """Read ``--benchmarks``: ``all`` for the published six, ``none``, or names with commas; ValueError if unknown."""
    names = {"all": PUBLISHED_BENCHMARKS, "none": ()}.get(text, text.split(","))
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise ValueError(f"--benchmarks has {unknown}; choose from {', '.join(BENCHMARKS)}, or all for the first six")
    return list(dict.fromkeys(names))


def file_stem(name: str, prompt: str) -> str:
    """``NAME``, or with the published prompt ``NAME_published``."""
    return f"{name}_published" if prompt == "published" else name


def user_messages(problem: str, suffix: str = PROMPT_SUFFIX) -> list[dict[str, str]]:
    """Return the chat that asks for ``problem``: one user turn that ends in exactly one suffix."""
    return [{"role": "user", "content": problem.strip().removesuffix(PROMPT_SUFFIX.strip()).strip() + suffix}]


def convert(spec: DatasetSpec, row: Mapping[str, Any], suffix: str = PROMPT_SUFFIX) -> dict[str, Any]:
    """Turn a row of the source into one of the written file: the columns that verl's ``RLHFDataset`` and reward
    functions read. ``index`` is still 0; ``id`` names the row in its source (empty if it has no name). KeyError,
    ValueError, TypeError, AttributeError: a field is missing, or cannot be used."""
    problem, gold = row[spec.problem], read_gold(row[spec.gold], spec.reader)
    if isinstance(problem, list):
        problem = problem[0]["content"] if [message["role"] for message in problem] == ["user"] else ""
    if not (problem := user_messages(problem, "")[0]["content"]):
        raise ValueError("no problem, or no single user message")
    if context := row.get("context"):  # a few of OlympiadBench
        problem = f"{str(context).strip()}\n{problem}"
    f"{problem}{gold}".encode()  # JSON's escapes allow lone surrogates, which parquet has no room for
    name = "/".join(str(row[column]) for column in spec.ids if row.get(column) is not None)
    return {
        "data_source": spec.name,
        "prompt": user_messages(problem, suffix),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": spec.split, "index": 0, "problem": problem, "id": name},
    }


def read_gold(value: Any, reader: str) -> str:
    """Return the ground truth as text, read as the reward function reads it: of a list all entries, joined with commas.
    A whole float loses its fraction (``27.0`` becomes ``27``); else one answer keeps its source's notation."""
    if reader == "boxed":
        value = last_boxed(value)
    elif reader == "hashes":
        value = value.rpartition("####")[2] if "####" in value else None
    if value in (None, []) or not (gold := gold_text(value).strip()):
        raise ValueError(f"no answer ({reader})")
    return gold


def published_id(spec: DatasetSpec, row: Mapping[str, Any], name: str) -> str | None:
    """The published id of a row, by its ``name`` or by its problem's text; ``None`` for one that is not published."""
    known = PUBLISHED_SUBSETS.get(spec.name, {})
    beginning = hashlib.sha256(str(row[spec.problem]).encode()).hexdigest()[:16]
    return name if name in known else next((id for id, hash in known.items() if hash == beginning), None)
