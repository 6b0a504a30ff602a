"""Columns of a token dump's table as arrays, and mean weights by place in the reasoning.

Shape suffixes: N responses, T their tokens end to end, R those of them in the reasoning, K bins of positions.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grail_advantage.dump import DumpHeader

BINS = 20
NEEDED = (
    "span",
    "no_scores",
    "mask",
    "weight",
    "base_advantage",
    "advantage",
    "methods",
)  # columns


def flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column's values end to end, and where each list begins and the last ends, int32; a null is an empty list."""
    array = column.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return array.flatten().to_numpy(zero_copy_only=False), offsets


def by_method(header: DumpHeader, table: pa.Table) -> dict[str, pa.Table]:
    """The table once for each method, with that method's ``score``, ``weight``, ``advantage`` and ``no_scores``.

    A row of an analysis has several methods, in its column ``methods``; a training has the one of its header. A method without
    token advantages of its own has its weights times the base advantage.
    """
    methods = table["methods"].combine_chunks()
    entries = methods.flatten()
    if not len(entries):
        return {header.method or "weights": table}
    row_of = pc.list_parent_indices(methods)
    tables = {}
    for name in pc.unique(entries.field("name")).to_pylist():
        chosen = pc.indices_nonzero(pc.equal(entries.field("name"), name))
        rows = table.take(row_of.take(chosen))
        columns = {
            field: entries.field(field).take(chosen)
            for field in ("score", "weight", "no_scores", "advantage")
        }
        if columns["advantage"].null_count and not rows["base_advantage"].null_count:
            weight, offsets = flat(pa.chunked_array([columns["weight"]]))
            base, _ = flat(rows["base_advantage"])
            columns["advantage"] = pa.ListArray.from_arrays(offsets, pa.array(weight * base))
        for field in columns.keys() & rows.column_names:
            rows = rows.set_column(rows.schema.get_field_index(field), field, columns[field])
        tables[name] = rows
    return tables


def gave_advantages(header: DumpHeader, table: pa.Table) -> set[str]:
    """The names in :func:`by_method` of the methods that gave token advantages themselves, not weights."""
    entries = table["methods"].combine_chunks().flatten()
    if not len(entries):
        return {header.method or "weights"} if header.gave_advantages else set()
    return set(entries.field("name").filter(entries.field("advantage").is_valid()).to_pylist())


def profiles(table: pa.Table) -> np.ndarray:
    """Each response's mean weight by place in its reasoning, float64 (N, K); NaN in bins without a token.

    The reasoning is the tokens that train and come before the answer, or all that train where there is no answer. Token
    ``i`` of ``n`` is at ``(i + 1/2) / n`` of the way.
    """
    mask_T, offsets = flat(table["mask"])
    rows = len(table)
    lengths_N = np.diff(offsets)
    span, of_span = flat(table["span"])
    # A copy, in which the reasoning before an answer ends earlier.
    ends_N = offsets[1:].copy()
    answered_N = np.diff(of_span) > 0
    ends_N[answered_N] = offsets[:-1][answered_N] + span[of_span[:-1][answered_N]]
    inside_T = mask_T & (np.arange(len(mask_T), dtype=np.int32) < np.repeat(ends_N, lengths_N))
    row_R = np.repeat(np.arange(rows, dtype=np.int32), lengths_N)[inside_T]
    tokens_N = np.bincount(row_R, minlength=rows)
    rank_R = np.arange(len(row_R)) - np.repeat(np.cumsum(tokens_N) - tokens_N, tokens_N)
    # The third of 5 tokens: (2 * 2 + 1) * 20 // (2 * 5) is bin 10 of 20.
    cell_R = row_R * BINS + (2 * rank_R + 1) * BINS // (2 * tokens_N[row_R])
    sums = np.bincount(cell_R, flat(table["weight"])[0][inside_T], minlength=rows * BINS)
    count = np.bincount(cell_R, minlength=rows * BINS)
    means = np.full(rows * BINS, np.nan)
    np.divide(sums, count, out=means, where=count > 0)
    return means.reshape(rows, BINS)
