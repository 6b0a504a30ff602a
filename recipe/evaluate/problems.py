"""The benchmarks, as :mod:`recipe.data.prepare` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.data.specs import BENCHMARKS, PUBLISHED_BENCHMARKS
from recipe.evaluate.files import digest

_COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")


@dataclass(frozen=True)
class Problem:
    """One problem: the chat that asks for it and its gold answer."""

    index: int
    """Row in the benchmark's file."""
    id: str
    messages: list[dict[str, str]]
    gold: str


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's problems in the order of its file."""

    name: str
    problems: tuple[Problem, ...]

    @cached_property
    def digest(self) -> str:
        """Changes with the wording, the number and the order of the problems."""
        return digest([problem.messages for problem in self.problems])

    @cached_property
    def gold_digest(self) -> str:
        """Changes with the gold answers."""
        return digest([problem.gold for problem in self.problems])


def benchmark_names(text: str) -> list[str]:
    """Read ``--benchmarks``: ``all`` for the published six, or names joined by commas.

    Raises:
        ValueError: no name, or an unknown one.
    """
    if text == "all":
        return list(PUBLISHED_BENCHMARKS)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        complaint = (
            f"--benchmarks {', '.join(map(repr, unknown))} is unknown" if unknown else "--benchmarks names nothing"
        )
        raise ValueError(f"{complaint}; choose from {', '.join(BENCHMARKS)}, or all for the six published ones")
    return names


def load_benchmarks(names: list[str], data_dir: Path) -> list[Benchmark]:
    """Read ``data_dir/NAME.parquet`` for every name.

    Raises:
        ValueError: files are missing (all of them are named), or one is not a file of :mod:`recipe.data.prepare`.
    """
    paths = {name: data_dir / f"{name}.parquet" for name in names}
    missing = {name: path for name, path in paths.items() if not path.is_file()}
    if missing:
        raise ValueError(
            f"there is no {', no '.join(map(str, missing.values()))}; make it with: bash scripts/prepare_data.sh "
            f"--train none --benchmarks {','.join(missing)} --output-dir {data_dir}"
        )
    return [_load(name, path) for name, path in paths.items()]


def _load(name: str, path: Path) -> Benchmark:
    remedy = "make it anew with scripts/prepare_data.sh"
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}); {remedy}") from None
    lacking = [column for column in _COLUMNS if column not in table.column_names]
    if lacking:
        raise ValueError(f"{path} has no column {' and no column '.join(map(repr, lacking))}; {remedy}")
    problems = []
    for index, row in enumerate(table.select(_COLUMNS).to_pylist()):
        try:
            messages = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
            gold = row["reward_model"]["ground_truth"]
            identity = str((row["extra_info"] or {}).get("id") or "")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}, row {index}: not in verl's schema ({error!r}); {remedy}") from None
        if not messages or not gold:
            raise ValueError(f"{path}, row {index}: no {'gold answer' if messages else 'prompt'}; {remedy}")
        if row["data_source"] != name:
            raise ValueError(f"{path}, row {index}: data_source is {row['data_source']!r}, not {name!r}; {remedy}")
        problems.append(Problem(index, identity, messages, gold))
    if not problems:
        raise ValueError(f"{path} has no rows; {remedy}")
    return Benchmark(name, tuple(problems))
