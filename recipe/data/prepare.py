"""Prepare the training set and the benchmarks: ``python -m recipe.data.prepare --help``.

Each dataset becomes ``NAME.parquet`` (verl's RLHF schema) and ``NAME.json`` (where its rows come from, which were
dropped, and whose ground truth is doubtful) in the output folder. A file that is there is complete.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets

from grail_advantage.dump import write_whole
from recipe.data.convert import PROMPTS, convert, published_id
from recipe.data.golds import check_golds
from recipe.data.specs import BENCHMARKS, PUBLISHED_SUBSETS, SPECS, TRAINING_SETS, DatasetSpec, benchmark_names

MAX_DROPPED, CHECKED_GOLDS = 0.05, 1_000
"""The largest share of rows that cannot be used; different ground truths of a set that are checked. In LaTeX each takes
0.1 s, all of DeepMath's most of an hour."""
Rows = Iterable[tuple[str, Any]]
"""Rows of a source, each with its place (``line 3``, ``row 3``); of a file as bytes of JSON."""


def file_stem(name: str, prompt: str) -> str:
    """``NAME``, or with the published prompt ``NAME_published``."""
    return f"{name}_published" if prompt == "published" else name


def read_local(spec: DatasetSpec, folder: Path) -> tuple[str, Rows]:
    """The path and the lines of ``NAME.jsonl`` or ``NAME_SPLIT.jsonl``: ``gsm8k_train.jsonl`` is no file of ``gsm8k``.
    ``load_dataset("json")`` refuses a file for one broken line, and makes dates of answers that look like them."""
    names = [f"{spec.name}.jsonl", f"{spec.name}_{spec.own_split}.jsonl"]
    if not (found := [folder / name for name in names if (folder / name).is_file()]):
        raise ValueError(f"--local-dir {folder} has neither {' nor '.join(names)}")
    return str(found[0]), ((f"line {n}", line) for n, line in enumerate(found[0].open("rb"), 1) if line.strip())


def read_hub(spec: DatasetSpec, place: str) -> tuple[str, Rows]:
    """The place and the rows of a dataset on the hub (``ORG/DATASET[:CONFIG[:SPLIT]]``), downloaded or cached."""
    name, config, split = [*place.split(":"), "", ""][:3]
    rows = datasets.load_dataset(name, config or None, split=split or spec.own_split)
    used = {spec.problem, spec.gold, "context", *spec.ids, *spec.required}  # without the pictures of some copies
    rows = rows.select_columns([column for column in rows.column_names if column in used])
    return place, ((f"row {number}", row) for number, row in enumerate(rows, 1))


def prepare_dataset(spec: DatasetSpec, source: str, rows: Rows, options: argparse.Namespace) -> str:
    """Write a dataset's two files and return a summary. A row that cannot be used is dropped and named; one whose
    ground truth fails a check of :mod:`recipe.data.golds` stays, and is named.

    Raises:
        ValueError: the source has no usable row, too many unusable ones, or not all published problems.
    """
    good, dropped, others = [], [], 0
    for place, row in rows:
        try:
            row = json.loads(row) if isinstance(row, bytes) else row
            if any(row.get(column) not in (None, value) for column, value in spec.required.items()):
                others += 1
            else:
                converted = convert(spec, row, PROMPTS[options.prompt])
                good.append((published_id(spec, row, converted["extra_info"]["id"]), converted))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            dropped.append(f"{source}, {place}: {type(error).__name__}: {error}")
            print("dropped:", dropped[-1], file=sys.stderr)
    if not good or len(dropped) > MAX_DROPPED * (len(good) + len(dropped)):
        raise ValueError(
            f"{len(good)} rows can be used, {len(dropped)} cannot, {others} are of another task than {spec.required}; "
            f"the problem is looked for in {spec.problem!r}, the answer in {spec.gold!r}"
        )
    chosen, ids = [row for _, row in good], PUBLISHED_SUBSETS.get(spec.name)
    if ids and options.subset == "published":
        if missing := [id for id in ids if id not in dict(good)]:
            text = f"lacks {len(missing)} of the {len(ids)} problems of the published evaluation, such as {missing[0]}"
            raise ValueError(f"{text}; take the full set ({spec.hub}), or as many others with --subset hash")
        chosen = [dict(good)[id] for id in ids]
    elif ids:  # by hash, so that the choice depends neither on the source's order nor on a library's random numbers
        chosen.sort(key=lambda row: (sha256(f"42\n{row['extra_info']['problem']}".encode()).digest(), str(row)))
        del chosen[len(ids) :]
    for index, row in enumerate(chosen):
        row["extra_info"]["index"] = index

    checked = golds = list(dict.fromkeys(row["reward_model"]["ground_truth"] for row in chosen))
    if len(golds) > CHECKED_GOLDS and not options.check_all_golds:
        checked = random.Random(0).sample(golds, CHECKED_GOLDS)  # the same ones each time
    doubtful = check_golds(checked)
    for gold, reasons in doubtful.items():
        print(f"doubtful ground truth {gold}: {reasons}", file=sys.stderr)
    note = {"source": source, "rows": len(chosen), "published_rows": spec.rows, "subset": ids and options.subset}
    note |= {"other_task": others, "dropped_rows": dropped}
    note |= {"checked_ground_truths": len(checked), "doubtful_ground_truths": doubtful}
    datasets.disable_progress_bars()
    path = options.output_dir / f"{file_stem(spec.name, options.prompt)}.parquet"
    content = io.BytesIO()
    datasets.Dataset.from_list(chosen).to_parquet(content)
    write_whole(path, content.getvalue())
    write_whole(path.with_suffix(".json"), json.dumps(note, indent=2, ensure_ascii=False) + "\n")
    figures = (f"{name} {len(of) if isinstance(of, list | dict) else of}" for name, of in note.items())
    return f"{path}: {', '.join(figures)}, of {len(golds)} different"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the datasets that the command line names, print a summary of each, and return 0 if every one is there."""
    parser = argparse.ArgumentParser("python -m recipe.data.prepare", description="Write parquet files for verl.")
    add, hub_form = parser.add_argument, "NAME=ORG/DATASET[:CONFIG[:SPLIT]]"
    add("--output-dir", type=Path, default=Path("data"), help="folder for the files (data)")
    add("--benchmarks", default="all", help=f"all (the first six), none, or, with commas: {', '.join(BENCHMARKS)}")
    add("--train", choices=(*TRAINING_SETS, "none"), default="deepmath", help="the training set (deepmath)")
    add("--local-dir", type=Path, help="folder with NAME.jsonl for every dataset, in place of the Hugging Face hub")
    add("--hub-id", action="append", default=[], metavar=hub_form, help="another place on the hub; may be repeated")
    subset = "which 200 problems of college_math and olympiadbench: those of the published evaluation, or by a hash"
    add("--subset", choices=("published", "hash"), default="published", help=subset)
    prompt = "published: NAME_published, with the U+0008 that the published run has in place of \\b"
    add("--prompt", choices=PROMPTS, default="corrected", help=prompt)
    golds = f"check also the ground truths beyond {CHECKED_GOLDS}; DeepMath's take most of an hour"
    add("--check-all-golds", action="store_true", help=golds)
    options = parser.parse_args(arguments)
    hub_ids = dict(text.partition("=")[::2] for text in options.hub_id)
    try:
        names = [name for name in (options.train,) if name != "none"] + benchmark_names(options.benchmarks)
    except ValueError as error:
        parser.error(str(error))
    if not names or not hub_ids.keys() <= {*names}:
        parser.error(f"--train and --benchmarks want {names or 'nothing'}; --hub-id names {[*hub_ids]}")
    failed = 0
    for name in names:
        spec, place = SPECS[name], hub_ids.get(name, SPECS[name].hub)
        local = options.local_dir is not None and name not in hub_ids
        try:
            source, rows = read_local(spec, options.local_dir) if local else read_hub(spec, place)
            print(prepare_dataset(spec, source, rows, options), flush=True)
        except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            remedy = "" if local else f" ({place}; name another with --hub-id {name}=, or a --local-dir)"
            print(f"FAILED {name}: {type(error).__name__}: {error}{remedy}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
