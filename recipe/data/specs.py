"""The datasets: the place of each, its columns of problem and gold answer, and its size.

Everything specific to one dataset is in :data:`SPECS`. Hub id, config and split can be overridden with ``--hub-id``, the
columns with ``--columns``. A dataset lists every column layout that its known copies use; the first one that the source
has is taken.

The published evaluation uses 200 problems of College-Math and of OlympiadBench but does not say which. This project takes
the 200 with the smallest SHA-256 of seed and problem text, so the choice depends neither on row order nor on a library's
random generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

GoldReader = Literal["plain", "boxed", "hashes"]
GOLD_READERS: tuple[str, ...] = get_args(GoldReader)


@dataclass(frozen=True)
class Columns:
    """The columns of the problem and of the gold answer, and the way to read the answer from its column.

    ``plain``: the value itself. ``boxed``: the last complete box in the text. ``hashes``: the text after ``####``.
    A problem column may hold text or chat messages.
    """

    problem: str
    gold: str
    reader: GoldReader = "plain"

    def __str__(self) -> str:
        return f"{self.problem!r} and {self.gold!r}"


@dataclass(frozen=True)
class HubLocation:
    """A split of a dataset on the Hugging Face hub."""

    dataset_id: str
    split: str
    config: str | None = None

    def __str__(self) -> str:
        return f"{self.dataset_id}{f':{self.config}' if self.config else ''}[{self.split}]"


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset. ``name`` is also the file stem looked for locally, the output's stem and the ``data_source`` value."""

    name: str
    hub: HubLocation
    layouts: tuple[Columns, ...]
    published_rows: int
    """Rows of the whole set, for the note in the summary when a source has another number."""
    split: Literal["train", "test"] = "test"
    subset: int | None = None
    """Problems kept, chosen by hash; all of them if None or if the source has fewer."""
    id_columns: tuple[str, ...] = ("id",)
    """Columns whose values, joined by ``/``, name a row in its source."""
    context_column: str | None = None
    """Text that belongs in front of the problem, where a row has one."""
    required_values: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Rows with another value in one of these columns belong to another task; a source without the column passes."""

    def source_columns(self, columns: Columns) -> set[str]:
        """Every column of the source that the conversion reads."""
        context = {self.context_column} if self.context_column else set()
        return {columns.problem, columns.gold, *self.id_columns, *self.required_values, *context}


_PROBLEM_ANSWER = Columns("problem", "answer")
_QUESTION_ANSWER = Columns("question", "answer")

_ALL_SPECS = (
    DatasetSpec(
        name="deepmath",
        hub=HubLocation("trl-lib/DeepMath-103K", "train"),
        layouts=(Columns("prompt", "solution"), Columns("question", "final_answer")),
        published_rows=97_870,
        split="train",
    ),
    DatasetSpec(
        name="math500",
        hub=HubLocation("HuggingFaceH4/MATH-500", "test"),
        layouts=(_PROBLEM_ANSWER, _QUESTION_ANSWER),
        published_rows=500,
        id_columns=("unique_id",),
    ),
    DatasetSpec(
        name="aime24",
        hub=HubLocation("HuggingFaceH4/aime_2024", "train"),
        layouts=(_PROBLEM_ANSWER, _QUESTION_ANSWER, Columns("problem", "solution", "boxed")),
        published_rows=30,
    ),
    DatasetSpec(
        name="amc23",
        hub=HubLocation("math-ai/amc23", "test"),
        layouts=(_PROBLEM_ANSWER, _QUESTION_ANSWER),
        published_rows=40,
    ),
    DatasetSpec(
        name="minerva_math",
        hub=HubLocation("svc-huggingface/minerva-math", "test"),
        layouts=(Columns("problem", "solution", "boxed"), _QUESTION_ANSWER, _PROBLEM_ANSWER),
        published_rows=272,
        id_columns=("idx",),
    ),
    DatasetSpec(
        name="college_math",
        hub=HubLocation("realtreetune/college_math", "test"),
        layouts=(_QUESTION_ANSWER, _PROBLEM_ANSWER),
        published_rows=2_818,
        subset=200,
        # Exercise numbers repeat from book to book.
        id_columns=("data_source", "question_number"),
    ),
    DatasetSpec(
        name="olympiadbench",
        hub=HubLocation("math-ai/olympiadbench", "test"),
        layouts=(Columns("question", "final_answer"), _PROBLEM_ANSWER),
        published_rows=675,
        subset=200,
        context_column="context",
        # Copies of the whole benchmark also hold physics, Chinese, pictures and proofs.
        required_values=MappingProxyType(
            {"subject": "Math", "language": "English", "modality": "Text-only", "question_type": "Open-ended"}
        ),
    ),
    DatasetSpec(
        name="gsm8k",
        hub=HubLocation("openai/gsm8k", "test", config="main"),
        layouts=(Columns("question", "answer", "hashes"),),
        published_rows=1_319,
        id_columns=("idx",),
    ),
)

SPECS: Mapping[str, DatasetSpec] = MappingProxyType({spec.name: spec for spec in _ALL_SPECS})
PUBLISHED_BENCHMARKS = ("math500", "aime24", "amc23", "minerva_math", "college_math", "olympiadbench")
"""The six of the published evaluation; ``gsm8k`` is an extra one that has to be asked for by name."""
BENCHMARKS = tuple(name for name, spec in SPECS.items() if spec.split == "test")
TRAINING_SETS = tuple(name for name, spec in SPECS.items() if spec.split == "train")
