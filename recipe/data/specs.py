"""The datasets: where each is, its columns of problem and ground truth, and its size.

The published evaluation uses 200 problems of College-Math and 200 of OlympiadBench, which lie in its repository
(declare-lab/grail, ``src/eval/eval_data``). ``published_subsets.json`` has their ids and the first 16 hex digits of the
SHA-256 of their problem texts, by which they are found in the full sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

_SUBSETS = Path(__file__).with_name("published_subsets.json")
PUBLISHED_SUBSETS: Mapping[str, Mapping[str, str]] = json.loads(_SUBSETS.read_text(encoding="utf-8"))
"""For each of the sets with a subset: the published problems' ids, and the beginnings of their hashes."""


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
