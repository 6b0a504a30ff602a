"""Prepare the training set and the benchmarks: ``python -m recipe.data.prepare --help``.

Each dataset becomes ``NAME.parquet`` (verl's RLHF schema) and ``NAME.json`` (its source and the dropped rows) in the output
folder. A file that is there is complete.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars

from grail_advantage.dump.whole_file import whole_file, write_whole
from recipe.data.convert import (
    FEATURES,
    PROMPT_SUFFIX,
    PUBLISHED_SUFFIX,
    SUBSET_SEED,
    BadRow,
    convert,
    published_id,
    subset_rank,
)
from recipe.data.golds import check_golds
from recipe.data.sources import Source, find_local_file, load_hub, read_jsonl
from recipe.data.specs import BENCHMARKS, PUBLISHED_SUBSETS, SPECS, TRAINING_SETS, Columns, DatasetSpec, benchmark_names

MAX_DROPPED = 0.05
CHECKED_GOLDS = 1_000
"""Different ground truths of a data set that are checked, the same ones each time. In LaTeX each takes about 0.1 s, so that
DeepMath's would take most of an hour."""
SUBSETS = ("published", "hash")
PROMPTS = {"corrected": PROMPT_SUFFIX, "published": PUBLISHED_SUFFIX}
"""The instruction behind every problem."""
_SHOWN_BAD_ROWS = 10
_HUB_FORM = "NAME=ORG/DATASET[:CONFIG[:SPLIT]]"


def file_stem(name: str, prompt: str) -> str:
    """``NAME``, or with the published prompt ``NAME_published``."""
    return f"{name}_published" if prompt == "published" else name


def prepare_dataset(
    spec: DatasetSpec,
    source: Source,
    output_dir: Path,
    max_dropped: float = MAX_DROPPED,
    subset: str = SUBSETS[0],
    prompt: str = "corrected",
    check_all_golds: bool = False,
) -> str:
    """Write ``output_dir/NAME.parquet`` and ``NAME.json`` and return a summary.

    Rows whose ground truth fails a check of :mod:`recipe.data.golds` stay, and are named with the reason.

    Args:
        max_dropped: largest share of unusable rows.
        prompt: of :data:`PROMPTS`; ``published`` writes ``NAME_published.parquet``.
        subset: of :data:`SUBSETS`, for a set of which the published evaluation uses a part.
        check_all_golds: check more than :data:`CHECKED_GOLDS` different ground truths.

    Raises:
        ValueError: the source lacks a column, has no usable row, too many unusable ones, or not all published problems.
    """
    columns = _choose_columns(spec, source)
    rows: list[dict[str, Any]] = []
    published: dict[str | None, dict[str, Any]] = {}
    dropped: list[str] = []
    reasons: Counter[str] = Counter()
    other_task = 0
    for place, row in source.rows:
        try:
            if (converted := convert(spec, columns, row, PROMPTS[prompt])) is None:
                other_task += 1
                continue
            rows.append(converted)
            if spec.subset is not None:
                published[published_id(spec, columns, row, converted["extra_info"]["id"])] = converted
        except BadRow as error:
            dropped.append(f"{source.name}, {place}: {error}")
            reasons[error.reason] += 1

    for message in dropped[:_SHOWN_BAD_ROWS]:
        print(f"dropped: {message}", file=sys.stderr)
    usable, of_task = len(rows), len(rows) + len(dropped)
    first = f"; the first bad one: {dropped[0]}" if dropped else ""
    if not usable:
        wanted = " and ".join(f"{name}={value}" for name, value in spec.required_values.items())
        others = f"; {other_task} rows do not have {wanted}" if other_task else ""
        raise ValueError(f"{spec.name}: {source.name} has no usable row{others}{first}")
    if (share := len(dropped) / of_task) > max_dropped:
        raise ValueError(
            f"{spec.name}: {len(dropped)} of {of_task} rows of {source.name} cannot be used ({share:.1%}), more than "
            f"--max-dropped {max_dropped}{first}; repair the source or allow more with --max-dropped"
        )

    notes = [f"the published set has {spec.published_rows} rows"] if of_task != spec.published_rows else []
    if spec.subset is not None:
        if subset == "published":
            rows = [published[id] for id in _all_published(spec, source, published)]
            notes.append(f"the {spec.subset} of the published evaluation, of {usable}")
        else:
            rows = sorted(rows, key=subset_rank)[: spec.subset]
            chosen = (
                f"{spec.subset} of {usable} chosen by hash, seed {SUBSET_SEED}; the published evaluation has others"
            )
            notes.append(chosen if usable > spec.subset else f"all kept: no more than {spec.subset}")
    for index, row in enumerate(rows):
        row["extra_info"]["index"] = index
    checked = different = list(dict.fromkeys(row["reward_model"]["ground_truth"] for row in rows))
    if len(different) > CHECKED_GOLDS and not check_all_golds:
        checked = random.Random(0).sample(different, CHECKED_GOLDS)
    faults = check_golds(checked)
    doubtful = [
        {"index": row["extra_info"]["index"], "ground_truth": gold, "reasons": faults[gold]}
        for row in rows
        if (gold := row["reward_model"]["ground_truth"]) in faults
    ]
    for entry in doubtful[:_SHOWN_BAD_ROWS]:
        print(f"doubtful ground truth {entry}", file=sys.stderr)
    note = {
        "source": source.name,
        "columns": columns._asdict(),
        "source_rows": of_task + other_task,
        "rows": len(rows),
        "dropped": dict(reasons.most_common()),
        "dropped_rows": dropped,
        "other_task": other_task,
        "checked_ground_truths": len(checked),
        "doubtful_ground_truths": doubtful,
        "notes": notes,
    }
    disable_progress_bars()
    path = output_dir / f"{file_stem(spec.name, prompt)}.parquet"
    with whole_file(path) as file:
        Dataset.from_list(rows, features=FEATURES).to_parquet(file)
    write_whole(path.with_suffix(".json"), json.dumps(note, indent=2, ensure_ascii=False) + "\n")

    counts = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    parts = [f"{len(dropped)} of {of_task + other_task} dropped: {counts}"] if dropped else []
    parts += [f"{other_task} of another task left out"] if other_task else []
    said = f"ground truths: {len(rows)} checked, {len(doubtful)} doubtful"
    if len(checked) < len(different):
        sample = f"a sample of {len(checked)} of {len(different)} different ones checked"
        said = f"ground truths: {sample}, {len(doubtful)} rows doubtful (--check-all-golds checks the others)"
    return "; ".join([f"{len(rows)} rows from {source.name}", *parts, *notes, said])


def _all_published(spec: DatasetSpec, source: Source, found: Collection[str | None]) -> list[str]:
    """Ids of the published problems, of which none may be missing."""
    ids = list(PUBLISHED_SUBSETS[spec.name])
    if missing := [id for id in ids if id not in found]:
        raise ValueError(
            f"{spec.name}: {source.name} lacks {len(missing)} of the {len(ids)} problems of the published evaluation, such as "
            f"{missing[0]}; take the full set ({spec.hub}), or {spec.subset} others with --subset hash"
        )
    return ids


def _choose_columns(spec: DatasetSpec, source: Source) -> Columns:
    """The first of the dataset's layouts that the source has."""
    for columns in spec.layouts:
        if not source.columns or {columns.problem, columns.gold} <= set(source.columns):
            return columns
    known = "; ".join(f"{columns.problem!r} and {columns.gold!r}" for columns in spec.layouts)
    raise ValueError(
        f"{spec.name}: {source.name} lacks the problem or the answer column: looked for {known}; it has "
        f"{', '.join(map(repr, source.columns))}; rename those that hold them"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the datasets that the command line names, print a summary of each, and return 0 if every one is there."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        names = [name for name in (options.train,) if name != "none"] + benchmark_names(options.benchmarks)
        hub = dict(text.partition("=")[::2] for text in options.hub_id)
        if not names:
            raise ValueError("--train none and --benchmarks none leave nothing to do")
        if unused := hub.keys() - names:
            raise ValueError(
                f"--hub-id names {', '.join(sorted(unused))}; it is {_HUB_FORM} with NAME one of {', '.join(names)}"
            )
    except ValueError as error:
        parser.error(str(error))

    failed = 0
    for name in names:
        spec = SPECS[name]
        try:
            if options.local_dir is not None and name not in hub:
                source = read_jsonl(find_local_file(name, options.local_dir))
            else:
                source = load_hub(spec, hub.get(name, spec.hub))
            settings = (options.max_dropped, options.subset, options.prompt, options.check_all_golds)
            summary = prepare_dataset(spec, source, options.output_dir, *settings)
            print(f"{options.output_dir / file_stem(name, options.prompt)}.parquet: {summary}", flush=True)
        except (ValueError, OSError) as error:
            print(f"FAILED {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.data.prepare",
        description="Write the training set and the benchmarks as parquet files for verl.",
    )
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("data"), help="folder for the files (default: data)")
    names = f"all (the published six), none, or names joined by commas: {', '.join(BENCHMARKS)} (default: all)"
    add("--benchmarks", default="all", help=names)
    add("--train", choices=(*TRAINING_SETS, "none"), default="deepmath", help="the training set (default: deepmath)")
    local = "folder with NAME.jsonl or NAME_*.jsonl for every dataset that --hub-id does not name"
    add("--local-dir", type=Path, help=f"{local}; without it the Hugging Face hub is read")
    hub = "read NAME from another place on the hub; may be repeated"
    add("--hub-id", action="append", default=[], metavar=_HUB_FORM, help=hub)
    subset = "of the two sets of which the published evaluation uses 200 problems: these, or 200 by a hash (default: published)"
    add("--subset", choices=SUBSETS, default=SUBSETS[0], help=subset)
    prompt = (
        "published: NAME_published, with the U+0008 that the published run has in place of \\b (default: corrected)"
    )
    add("--prompt", choices=PROMPTS, default="corrected", help=prompt)
    share = f"largest share of unusable rows that still gives a file (default: {MAX_DROPPED})"
    add("--max-dropped", type=float, default=MAX_DROPPED, help=share)
    golds = f"check every ground truth, where a set has more than {CHECKED_GOLDS}; DeepMath's take most of an hour"
    add("--check-all-golds", action="store_true", help=golds)
    return parser


if __name__ == "__main__":
    sys.exit(main())
