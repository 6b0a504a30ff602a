"""Prepare the training set and the benchmarks (``python -m recipe.data.prepare --help``), each as ``NAME.parquet`` in
verl's RLHF schema. A file that is there is complete."""

import argparse
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets

from grail_advantage.dump import write_whole
from grail_advantage.text_io import say
from recipe.data import specs
from recipe.data.specs import BENCHMARKS, SPECS, DatasetSpec, benchmark_names

Rows = Iterable[tuple[str, Any]]
"""Each with its place, such as ``line 3``; of a file as bytes of JSON."""


def read_local(spec: DatasetSpec, folder: Path) -> tuple[str, Rows]:
    """Returns the path and the lines of ``NAME.jsonl`` or ``NAME_SPLIT.jsonl``: ``gsm8k_train.jsonl`` is no file of
    ``gsm8k``. ``load_dataset("json")`` refuses a file for one broken line, and makes dates of answers that look like
    them."""
    names = (f"{spec.name}.jsonl", f"{spec.name}_{spec.hub_split}.jsonl")
    for file in map(folder.joinpath, names):
        if file.is_file():
            lines = enumerate(file.open("rb"), start=1)
            return str(file), ((f"line {number}", line) for number, line in lines if line.strip())
    raise ValueError(f"--local-dir {folder} has neither {' nor '.join(names)}")


def read_hub(spec: DatasetSpec, place: str) -> tuple[str, Rows]:
    """Returns the place and the rows of a dataset on the hub (``ORG/DATASET[:CONFIG[:SPLIT]]``), downloaded or
    cached."""
    name, config, split = [*place.split(":", 2), "", ""][:3]
    rows = datasets.load_dataset(name, config or None, split=split or spec.hub_split)
    # Without the pictures of some copies.
    used = {spec.problem, spec.gold, "context", *spec.ids, *spec.required}
    rows = rows.select_columns(sorted(used.intersection(rows.column_names)))
    return place, ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def prepare_dataset(spec: DatasetSpec, source: str, rows: Rows, prompt: str, folder: Path) -> str:
    """Write a dataset's file and return a summary. A row that cannot be used is dropped and named; ValueError for no
    usable row, over 5 % unusable ones, or a published problem that is not there."""
    good = []
    by_id = {}
    dropped = 0
    foreign = 0
    for place, row in rows:
        try:
            row = json.loads(row) if isinstance(row, bytes) else row
            if any(row.get(column) not in (None, value) for column, value in spec.required.items()):
                foreign += 1
                continue
            converted = specs.convert(spec, row, specs.PROMPTS[prompt])
            by_id[specs.published_id(spec, row, converted["extra_info"]["id"])] = converted
            good.append(converted)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            dropped += 1
            say(f"dropped: {source}, {place}: {type(error).__name__}: {error}", file=sys.stderr)
    counts = f"{dropped} dropped, {foreign} of another task"
    # One row in twenty may be broken.
    if not good or dropped > 0.05 * (len(good) + dropped):
        raise ValueError(
            f"{len(good)} rows can be used, {counts}; columns: {spec.problem}, {spec.gold}, {spec.required}"
        )
    ids = specs.PUBLISHED_SUBSETS.get(spec.name, {})
    if missing := [id for id in ids if id not in by_id]:
        text = f"lacks {len(missing)} of the {len(ids)} problems of the published evaluation, such as {missing[0]}"
        raise ValueError(f"{text}; take the full set ({spec.hub})")
    # The published problems in their order, or, of other sets, all.
    chosen = [by_id[id] for id in ids] or good
    for index, row in enumerate(chosen):
        row["extra_info"]["index"] = index
    datasets.disable_progress_bars()
    path = folder / f"{spec.name}{specs.ENDINGS[prompt]}"
    # To memory first: a file that is there is complete.
    content = io.BytesIO()
    datasets.Dataset.from_list(chosen).to_parquet(content)
    write_whole(path, content.getvalue())
    return f"{path}: {len(chosen)} rows, of {spec.rows} published, {counts}, from {source}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the named datasets, print a summary of each, and return 0 if every one is there."""
    parser = argparse.ArgumentParser(
        "python -m recipe.data.prepare", description="Write parquet files for verl."
    )
    add = parser.add_argument
    add("--output-dir", type=Path, default="data", help="folder for the files (data)")
    add(
        "--benchmarks",
        type=benchmark_names,
        default="all",
        help=f"all (six), none, or of {', '.join(BENCHMARKS)}",
    )
    add(
        "--train",
        choices=("deepmath", "gsm8k_train", "none"),
        default="deepmath",
        help="the training set (deepmath)",
    )
    add(
        "--local-dir",
        type=Path,
        help="folder with NAME.jsonl for every dataset, in place of the Hugging Face hub",
    )
    add(
        "--hub-id",
        action="append",
        default=[],
        metavar="NAME=ORG/DATASET[:CONFIG[:SPLIT]]",
        help="another place on the hub; may be repeated",
    )
    add(
        "--prompt",
        choices=specs.PROMPTS,
        default="corrected",
        help="published: with its U+0008, as NAME_published",
    )
    options = parser.parse_args(arguments)
    hub_ids = dict(text.partition("=")[::2] for text in options.hub_id)
    names = [name for name in (options.train, *options.benchmarks) if name != "none"]
    if not names or not hub_ids.keys() <= {*names}:
        parser.error(
            f"--train and --benchmarks want {names or 'nothing'}; --hub-id names {[*hub_ids]}"
        )
    failed = 0
    for name in names:
        spec = SPECS[name]
        remedy = ""
        try:
            if options.local_dir is not None and name not in hub_ids:
                source, rows = read_local(spec, options.local_dir)
            else:
                remedy = f"; name another place with --hub-id {name}=, or a --local-dir"
                source, rows = read_hub(spec, hub_ids.get(name, spec.hub))
            say(prepare_dataset(spec, source, rows, options.prompt, options.output_dir))
        except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            say(f"FAILED {name}: {type(error).__name__}: {error}{remedy}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
