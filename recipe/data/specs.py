"""The datasets: the place of each, its columns of problem and ground truth, and its size.

A dataset lists every column layout that its known copies use; the first one that the source has is taken.

The published evaluation uses 200 problems of College-Math and 200 of OlympiadBench, which lie in its authors' repository
(declare-lab/grail, ``src/eval/eval_data``). ``published_subsets.json`` has their ids and the first 16 hex digits of the SHA-256
of their problem texts, by which they are found in the full sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple


class Columns(NamedTuple):
    """The columns of the problem (text or chat messages) and of the ground truth."""

    problem: str
    gold: str
    reader: Literal["plain", "boxed", "hashes"] = "plain"
    """``plain``: the column's value. ``boxed``: the last complete box in its text. ``hashes``: the text after ``####``."""


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset. ``name`` is also the file stem looked for locally, the output's stem and the ``data_source`` value."""

    name: str
    hub: str
    """``ORG/DATASET:CONFIG:SPLIT``; config and split may be left out."""
    layouts: tuple[Columns, ...]
    published_rows: int
    split: Literal["train", "test"] = "test"
    subset: int | None = None
    """Problems kept: the published ones, or chosen by hash; all of them if None."""
    id_columns: tuple[str, ...] = ("id",)
    """Columns whose values, joined by ``/``, name a row in its source."""
    context_column: str | None = None
    """Text that belongs in front of the problem, where a row has one."""
    required_values: Mapping[str, str] = field(default_factory=dict)
    """Rows with another value in one of these columns belong to another task; a source without the column passes."""


_PROBLEM, _QUESTION = Columns("problem", "answer"), Columns("question", "answer")

_BOXED = Columns("problem", "solution", "boxed")
# Copies of the whole OlympiadBench also hold physics, Chinese, pictures and proofs.
_OLYMPIAD = {"subject": "Math", "language": "English", "modality": "Text-only", "question_type": "Open-ended"}

_ALL_SPECS = (
    DatasetSpec("math500", "HuggingFaceH4/MATH-500", (_PROBLEM, _QUESTION), 500, id_columns=("unique_id",)),
    DatasetSpec("aime24", "HuggingFaceH4/aime_2024::train", (_PROBLEM, _QUESTION, _BOXED), 30),
    DatasetSpec("amc23", "math-ai/amc23", (_PROBLEM, _QUESTION), 40),
    DatasetSpec(
        "minerva_math", "svc-huggingface/minerva-math", (_BOXED, _QUESTION, _PROBLEM), 272, id_columns=("idx",)
    ),
    DatasetSpec(
        "college_math",
        "realtreetune/college_math",
        (_QUESTION, _PROBLEM),
        published_rows=2_818,
        subset=200,
        id_columns=("data_source", "question_number"),  # exercise numbers repeat from book to book
    ),
    DatasetSpec(
        "olympiadbench",
        "math-ai/olympiadbench",
        (Columns("question", "final_answer"), _PROBLEM),
        published_rows=675,
        subset=200,
        context_column="context",
        required_values=_OLYMPIAD,
    ),
    DatasetSpec("gsm8k", "openai/gsm8k:main", (Columns("question", "answer", "hashes"),), 1_319, id_columns=("idx",)),
    DatasetSpec(
        "deepmath",
        "trl-lib/DeepMath-103K",
        (Columns("prompt", "solution"), Columns("question", "final_answer")),
        published_rows=97_870,
        split="train",
    ),
    DatasetSpec(
        "gsm8k_train",
        "openai/gsm8k:main",
        (Columns("question", "answer", "hashes"),),
        published_rows=7_473,
        split="train",
        id_columns=("idx",),
    ),
)

SPECS: Mapping[str, DatasetSpec] = MappingProxyType({spec.name: spec for spec in _ALL_SPECS})
PUBLISHED_SUBSETS: Mapping[str, Mapping[str, str]] = json.loads(
    Path(__file__).with_name("published_subsets.json").read_text(encoding="utf-8")
)
"""For each of the sets with a subset: the published problems' ids, and the beginnings of their hashes."""
PUBLISHED_BENCHMARKS = ("math500", "aime24", "amc23", "minerva_math", "college_math", "olympiadbench")
"""The six of the published evaluation; ``gsm8k`` is an extra one that has to be asked for by name."""
BENCHMARKS = tuple(name for name, spec in SPECS.items() if spec.split == "test")
TRAINING_SETS = tuple(name for name, spec in SPECS.items() if spec.split == "train")


def benchmark_names(text: str) -> list[str]:
    """Read ``--benchmarks``: ``all`` for the published six, ``none``, or names joined by commas.

    Raises:
        ValueError: a name is unknown.
    """
    if text in ("all", "none"):
        return list(PUBLISHED_BENCHMARKS) if text == "all" else []
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise ValueError(
            f"--benchmarks {', '.join(map(repr, unknown))} is unknown; choose from {', '.join(BENCHMARKS)}, or all for the "
            "six published ones"
        )
    return names
