"""The datasets of ``datasets.json``, and how their rows become rows of verl's RLHF schema.

The published evaluation uses 200 problems of College-Math and 200 of OlympiadBench, which lie in its repository
(declare-lab/grail, ``src/eval/eval_data``). ``published_subsets.json`` has their ids and the first 16 hex digits of the
SHA-256 of their problem texts, by which they are found in the full sets.
"""

import hashlib
import json
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grail_advantage.reward import gold_text, last_boxed

PROMPT_SUFFIX = r" Please reason step by step, and put your final answer within \boxed{}."
"""The instruction after every problem, in training and evaluation alike (arXiv 2606.04889, training set-up)."""
PUBLISHED_SUFFIX = PROMPT_SUFFIX.replace(r"\b", "\b")
"""As the published run's model read it: its code has a plain string, in which ``\\b`` is the character U+0008."""
PROMPTS = {"corrected": PROMPT_SUFFIX, "published": PUBLISHED_SUFFIX}
ENDINGS = {"corrected": ".parquet", "published": "_published.parquet"}  # of the files' names
READERS = {
    "plain": lambda value: value,
    "boxed": last_boxed,
    "hashes": lambda text: text.partition("####")[2],
}
"""From a column to the ground truth: the value itself, the last complete box in its text, the text after ####."""


class DatasetSpec(NamedTuple):
    """One dataset. ``name`` is also the stem of the local file and of the output, and the rows' ``data_source``."""

    name: str
    hub: str  # ORG/DATASET[:CONFIG]
    rows: int  # of the published set
    # Column with a text, or with a list of chat messages that is one of the user.
    problem: str = "problem"
    # Column that one of READERS reads.
    gold: str = "answer"
    reader: str = "plain"
    # Columns that together name a row in its source: exercise numbers repeat by book.
    ids: Sequence[str] = ("id",)
    split: str = "test"  # in the written rows
    hub_split: str = "test"
    # Rows with another value are of another task: physics, proofs, other languages.
    required: Mapping[str, str] = {}


_HERE = Path(__file__).parent
SPECS = {
    row["name"]: DatasetSpec(**row) for row in json.loads((_HERE / "datasets.json").read_bytes())
}
PUBLISHED_SUBSETS: Mapping[str, Mapping[str, str]] = json.loads(
    (_HERE / "published_subsets.json").read_bytes()
)
"""For each of the sets with a subset: the published problems' ids, and the beginnings of their hashes."""
BENCHMARKS = tuple(name for name, spec in SPECS.items() if spec.split == "test")


def benchmark_names(text: str) -> list[str]:
    """Read ``--benchmarks``: ``all`` for the published six, ``none``, or names with commas (else ArgumentTypeError)."""
    names = {"all": BENCHMARKS[:6], "none": ()}.get(text, text.split(","))
    if unknown := [name for name in names if name not in BENCHMARKS]:
        raise ArgumentTypeError(
            f"{unknown} unknown; choose from {', '.join(BENCHMARKS)}, or all for the first six"
        )
    return list(dict.fromkeys(names))


def user_messages(problem: str, suffix: str = PROMPT_SUFFIX) -> list[dict]:
    """Return the chat that asks for ``problem``: one user turn that ends in exactly one suffix."""
    text = problem.strip().removesuffix(PROMPT_SUFFIX.strip()).strip()
    return [{"role": "user", "content": text + suffix}]


def convert(spec: DatasetSpec, row: Mapping[str, Any], suffix: str = PROMPT_SUFFIX) -> dict:
    """Turn a row of the source into one of the written file: the columns that verl's ``RLHFDataset`` and reward
    functions read. ``index`` is still 0; ``id`` names the row in its source (empty if it has no name). KeyError,
    ValueError, TypeError, AttributeError: a field is missing, or cannot be used."""
    problem = row[spec.problem]
    gold = read_gold(row[spec.gold], spec.reader)
    match problem:
        case [{"role": "user", "content": content}]:
            problem = content
        case list():
            problem = ""
    problem = user_messages(problem, "")[0]["content"]
    if not problem:
        raise ValueError("no problem, or no single user message")
    # A few problems of OlympiadBench have one.
    if context := row.get("context"):
        problem = f"{str(context).strip()}\n{problem}"
    # JSON's escapes allow lone surrogates, which parquet has no room for.
    f"{problem}{gold}".encode()
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
    A whole float loses its fraction (``27.0`` becomes ``27``); else one answer keeps its source's notation.
    ValueError: there is none."""
    return gold_text(READERS[reader](value)).strip()


def published_id(spec: DatasetSpec, row: Mapping[str, Any], name: str) -> str | None:
    """Returns the published id of a row, by its ``name`` or by its problem's text; ``None`` for one that is not
    published."""
    hashes = PUBLISHED_SUBSETS.get(spec.name, {})
    beginning = hashlib.sha256(str(row[spec.problem]).encode()).hexdigest()[:16]
    if name in hashes:
        return name
    return next((id for id, hash in hashes.items() if hash == beginning), None)
