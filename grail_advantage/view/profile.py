"""Columns of a token dump's table as arrays, and mean weights by place in the reasoning.

Shape suffixes: N responses, T their tokens end to end, R those of one in its reasoning, K bins of positions.
"""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grail_advantage.dump import DumpHeader

BINS = 20
NEEDED = ("span", "no_scores", "mask", "weight", "base_advantage", "advantage", "methods")


def flat(column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column's values end to end, and where each list begins and the last ends, int32; a null is an empty list."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pc.list_flatten(column).to_numpy(zero_copy_only=False), offsets


def by_method(header: DumpHeader, table: pa.Table) -> tuple[dict[str, pa.Table], set[str]]:
    """The table once for each method, with that method's ``score``, ``weight``, ``advantage`` and ``no_scores``, and the
    names of the methods that gave token advantages themselves, not weights.

    A row of an analysis has several methods, in its column ``methods``; a training has the one of its header. A method without
    token advantages of its own has its weights times the base advantage.
    """
    entries = table["methods"].combine_chunks().flatten()
    signed = set()
    if not len(entries):
        name = header.method or "weights"
        if header.gave_advantages:
            signed.add(name)
        return {name: table}, signed
    shared = {name: table[name] for name in table.column_names}
    names = pc.unique(entries.field("name")).to_pylist()
    tables = {}
    for place, name in enumerate(names):
        # Every row has the same methods in the same order, as the reader of the file checked.
        of_method = entries[place :: len(names)]
        fields = ("score", "weight", "no_scores", "advantage")
        columns = {field: of_method.field(field) for field in fields}
        if not columns["advantage"].null_count:
            signed.add(name)
        elif not table["base_advantage"].null_count:
            weight, offsets = flat(columns["weight"])
            base, _ = flat(table["base_advantage"])
            columns["advantage"] = pa.ListArray.from_arrays(offsets, pa.array(weight * base))
        tables[name] = pa.table({**shared, **columns})
    return tables, signed


def profiles(table: pa.Table) -> np.ndarray:
    """Each response's mean weight by place in its reasoning, float64 (N, K); NaN in bins without a token.

    The reasoning is the tokens that train and come before the answer, or all that train where there is no answer. Token
    ``i`` of ``n`` is at ``(i + 1/2) / n`` of the way.
    """
    mask_T, offsets = flat(table["mask"])
    weight_T, _ = flat(table["weight"])
    spans = table["span"].to_pylist()
    means_NK = np.full((len(table), BINS), np.nan)
    for means_K, span, (start, end) in zip(means_NK, spans, pairwise(offsets), strict=True):
        if span:
            end = start + span[0]
        weights_R = weight_T[start:end][mask_T[start:end]]
        # The third of 5 tokens: (2 * 2 + 1) * 20 // (2 * 5) is bin 10 of 20.
        bins_R: np.ndarray = (2 * np.arange(len(weights_R)) + 1) * BINS // (2 * len(weights_R))
        count_K = np.bincount(bins_R, minlength=BINS)
        sums_K = np.bincount(bins_R, weights_R, minlength=BINS)
        np.divide(sums_K, count_K, out=means_K, where=count_K > 0)
    return means_NK
