"""Rows from a local JSONL file or from the Hugging Face hub, each with the number a person needs to find it again."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.features.features import require_decoding

from recipe.data.convert import BadRow
from recipe.data.specs import SPECS, DatasetSpec


class Source(NamedTuple):
    """Rows by place (``line 3`` or ``row 3``), each its fields or the reason why a line is no row."""

    name: str
    columns: Collection[str]
    rows: Iterable[tuple[str, dict[str, Any] | BadRow]]


def read_jsonl(path: Path) -> Source:
    """One JSON object a line, UTF-8, blank lines ignored.

    ``load_dataset("json")`` refuses the whole file for one broken line, and makes dates of answers that look like them.
    """
    rows = [(f"line {number}", _row(line)) for number, line in enumerate(path.open("rb"), 1) if line.strip()]
    columns = dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)
    return Source(str(path), columns, rows)


def _row(line: bytes) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return BadRow("not valid JSON", str(error))
    return row if isinstance(row, dict) else BadRow("not a JSON object", type(row).__name__)


def load_hub(spec: DatasetSpec, place: str) -> Source:
    """A split of a dataset on the hub (``ORG/DATASET[:CONFIG[:SPLIT]]``), downloaded or taken from the hub's cache."""
    dataset_id, config, split, *_ = [*place.split(":"), "", ""]
    split = split or spec.hub.partition("::")[2] or spec.split
    name = f"hub dataset {dataset_id}{f':{config}' if config else ''}[{split}]"
    try:
        rows = datasets.load_dataset(dataset_id, config or None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{spec.name}: cannot load {name} ({type(error).__name__}: {error}); check the network, name another with "
            f"--hub-id {spec.name}=ORG/DATASET[:CONFIG[:SPLIT]], or put {spec.name}.jsonl into a --local-dir"
        ) from error
    # Pictures, which some copies carry, would all be decoded.
    pictures = [column for column, feature in rows.features.items() if require_decoding(feature)]
    return Source(
        name, rows.column_names, ((f"row {n}", row) for n, row in enumerate(rows.remove_columns(pictures), 1))
    )


def find_local_file(name: str, folder: Path) -> Path:
    """Find ``NAME.jsonl`` or the one ``NAME_*.jsonl`` in ``folder``; ValueError where there is none, or several.

    ``gsm8k_train.jsonl`` is no file of the benchmark ``gsm8k``, nor ``deepmath_test.jsonl`` one to train on;
    ``aime24_train.jsonl`` is one of ``aime24``, whose only split has that name.
    """
    exact = folder / f"{name}.jsonl"
    paths = [exact] if exact.is_file() else sorted(folder.glob(f"{name}_*.jsonl"))
    spec = SPECS[name]
    other = "train" if spec.split == "test" else "test"
    of_other = [path for path in paths if re.search(f"(?i)(?<![a-z]){other}", path.stem.removeprefix(name))]
    if spec.hub.endswith(f":{other}"):  # a benchmark that is published as a train split
        of_other = []
    paths = [path for path in paths if path not in of_other]
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{name}: {folder} has several files for it: {names}; rename the one to use to {name}.jsonl")
    if not paths:
        found = f", and {', '.join(path.name for path in of_other)} is another split" if of_other else ""
        remedy = f"leave it out with --benchmarks and --train, or name a place on the hub with --hub-id {name}="
        raise ValueError(f"{name}: no {name}.jsonl or {name}_*.jsonl in --local-dir {folder}{found}; {remedy}")
    return paths[0]
