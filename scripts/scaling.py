"""What a step costs on 8, 64 and 512 GPUs, and how much of it is the token weights': a simulation, its measured points, a page.

    python scripts/scaling.py                              # the tables, on the terminal
    python scripts/scaling.py --write docs/scaling.md      # into the page, and its figure

Seconds on GPUs are predicted, not measured. The simulation deals rows with the code that a run deals them with
(``grail_advantage/verl_ext/row_balance.py``, verl's micro-batches) and knows four things: the arithmetic of a model
(scripts/sizing.py), the bytes that FSDP2 sends, how long a collective takes, and what the driver does with a token. The last
three are compared with what ``benchmarks/bench_scaling.py`` measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from sizing import MEAN_PROMPT, MODELS, SELECTED, SHARE_OF_PEAK, Model, cache_bytes, parameters  # noqa: E402
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions  # noqa: E402

from grail_advantage.verl_ext.row_balance import spread  # noqa: E402
from recipe.marked_text import write_marked  # noqa: E402

MEASURED = ROOT / "benchmarks" / "results" / "scaling-cpu.json"
FIGURE = ROOT / "docs" / "images" / "scaling.png"

# ---- assumed ----

OPERATIONS = 989e12
"""bfloat16 operations/s of an H100 SXM without sparsity, by data sheet."""
MEMORY_BANDWIDTH = 3.35e12
"""bytes/s of its memory, by data sheet."""
CACHE = 40e9
"""bytes of a GPU that its engine has for keys and values: half of 80 GB."""
NVLINK = 450e9
"""bytes/s of a GPU in each direction: NVLink 4, 900 GB/s in both, by data sheet."""
NETWORK = 50e9
"""bytes/s of a GPU's own network card in each direction: InfiniBand NDR, 400 Gbit/s."""
DECODING_SHARE = 0.6
"""Of the memory bandwidth, while responses are generated."""
NETWORK_SHARE = 0.7
"""Of these bandwidths, that a collective reaches."""
HOP = 5e-6
"""seconds that each further rank of a ring adds to a collective."""
GPUS_A_NODE = 8
ROWS, GROUP, LONGEST = 2048, 16, 32768
MEDIAN, SIGMA = 6000, 0.8
"""Of the lengths of responses: log-normal, cut at LONGEST."""
EPOCHS = 1
MICRO_BATCH_TOKENS = LONGEST + 1024
"""One sequence of full length."""
LAYOUTS = ((8, 1), (64, 1), (512, 1), (512, 8))
"""GPUs, and how many of them share a sequence (``ulysses_sequence_parallel_size``)."""


@dataclass(frozen=True)
class Ring:
    """A way to send, as collectives feel it."""

    bandwidth: float
    """bytes/s of a rank in one direction"""
    hop: float
    """seconds a further rank"""

    def seconds(self, size: float, ranks: int) -> float:
        """Of an all-gather or a reduce-scatter of a tensor of ``size`` bytes as a whole: every rank sends all parts but one."""
        return (ranks - 1) * self.hop + size * (ranks - 1) / ranks / self.bandwidth


@dataclass(frozen=True)
class Layout:
    """GPUs of a run; parameters are sharded over all of them."""

    gpus: int
    together: int = 1
    """GPUs that share a sequence"""

    @property
    def ranks(self) -> int:
        """That get rows of their own."""
        return self.gpus // self.together

    @property
    def speed(self) -> float:
        """Operations/s on a sequence."""
        return self.together * OPERATIONS * SHARE_OF_PEAK

    @property
    def ring(self) -> Ring:
        """Within a node NVLink, beyond it the network cards of the node, each with its part of the data."""
        bandwidth = NVLINK if self.gpus <= GPUS_A_NODE else min(NVLINK, GPUS_A_NODE * NETWORK)
        return Ring(NETWORK_SHARE * bandwidth, HOP)


# ---- bytes that FSDP2 sends ----


@dataclass(frozen=True)
class Sent:
    """Collectives, and elements of the tensors that they gather or scatter, as a whole."""

    gathers: int = 0
    gathered: int = 0
    scatters: int = 0
    scattered: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, times: int) -> Sent:
        return Sent(*(getattr(self, name) * times for name in self.__dataclass_fields__))


def sent_by(*, blocks: int, whole: int, tied: bool, backward: bool = False, step: bool = False) -> Sent:
    """What FSDP2 sends for one micro-batch, or for an optimiser step.

    Blocks, untied embeddings and an untied head are units of their own, what is left is one more
    (``verl.utils.fsdp_utils.apply_fsdp2``). A forward gathers each unit, and so does a backward, whether it goes to the
    parameters or to the embeddings' output alone; with ``reshard_after_forward`` nothing stays. The gradients of all
    micro-batches are scattered at once.

    Args:
        blocks: decoder blocks.
        whole: parameters of the model.
        tied: whether embeddings and head are one.
        backward: the micro-batch has one.
        step: what the optimiser step's gradients add.
    """
    units = blocks + (1 if tied else 3)
    if step:
        return Sent(0, 0, units, whole)
    return Sent(units, whole) * (2 if backward else 1)


def sending_seconds(sent: Sent, ranks: int, ring: Ring, *, gather_bytes: int = 2, scatter_bytes: int = 4) -> float:
    """Of collectives one after the other, bfloat16 parameters and float32 gradients."""
    if ranks == 1:
        return 0.0
    gathers = sent.gathers and sent.gathers * ring.seconds(gather_bytes * sent.gathered / sent.gathers, ranks)
    scatters = sent.scatters and sent.scatters * ring.seconds(scatter_bytes * sent.scattered / sent.scatters, ranks)
    return gathers + scatters


# ---- arithmetic ----


def forward_operations(model: Model, lengths: np.ndarray) -> np.ndarray:
    """Of each sequence: two a parameter and token, and causal attention, ``2 L H d S^2``."""
    attention = 2.0 * model.layers * model.heads * model.head_dim
    return 2.0 * parameters(model) * lengths + attention * lengths.astype(float) ** 2


def micro_batches(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """A rank's rows in so many micro-batches, as verl shares them out."""
    workload = calculate_workload(torch.tensor(lengths)).tolist()
    parts = get_seqlen_balanced_partitions(workload, count, equal_size=False)
    return [np.array(part) for part in parts]


def needed(lengths: np.ndarray) -> int:
    """Micro-batches that a rank's rows need by their tokens."""
    return min(len(lengths), -(-int(lengths.sum()) // MICRO_BATCH_TOKENS))


def phase_seconds(
    model: Model, ranks: list[np.ndarray], forwards: float, sent: Sent, layout: Layout
) -> tuple[float, Sent]:
    """A phase in which every rank works through its rows, with collectives that join the ranks in every block.

    Args:
        model: the model.
        ranks: lengths of each data-parallel rank's rows, at least one.
        forwards: what a row costs, in forwards.
        sent: of one micro-batch.
        layout: the GPUs.

    Returns:
        seconds, and what is sent.
    """
    if not len(ranks[0]):
        return 0.0, Sent()
    count = max(needed(rows) for rows in ranks)
    gather = sending_seconds(sent, layout.gpus, layout.ring)
    work = np.zeros((len(ranks), count))
    for rank, rows in enumerate(ranks):
        operations = forwards * forward_operations(model, rows)
        parts = sorted((operations[part].sum() for part in micro_batches(rows, count)), reverse=True)
        work[rank] = np.array(parts) / layout.speed
    # Each unit is gathered while the one before computes.
    return float(np.maximum(work.max(axis=0), gather).sum()), sent * count


# ---- one step ----


def draw(rng: np.random.Generator, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each row, prompt and response, and the places of the rows that need scores."""
    responses = np.minimum(rng.lognormal(np.log(MEDIAN), SIGMA, rows), LONGEST).astype(int)
    return responses + MEAN_PROMPT, np.flatnonzero(rng.random(rows) < SELECTED)


def in_ranks(order: Sequence[int], values: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Rows in an order, as many to each rank."""
    return list(values[np.array(order)].reshape(ranks, -1))


def verls_order(lengths: np.ndarray, ranks: int) -> list[int]:
    """As ``PPOTrainer._balance_batch`` deals a batch."""
    workload = calculate_workload(torch.tensor(lengths)).tolist()
    return [row for part in get_seqlen_balanced_partitions(workload, ranks, equal_size=True) for row in part]


def shared_forward(
    model: Model, lengths: np.ndarray, selected: np.ndarray, order: Sequence[int], layout: Layout
) -> tuple[float, Sent]:
    """The old log-probabilities with the saliency of the selected rows, as
    ``grail_advantage.verl_ext.shared_forward.infer_batch_with_saliency`` runs them: every rank keeps the graph of as many rows
    as the one with the most, its shortest others filling up, and runs the rest without one.

    Returns:
        seconds, and what is sent.
    """
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[selected] = True
    own_lengths, own_chosen = in_ranks(order, lengths, layout.ranks), in_ranks(order, chosen, layout.ranks)
    most = max(int(flags.sum()) for flags in own_chosen)
    with_graph, without = [], []
    for rows, flags in zip(own_lengths, own_chosen, strict=True):
        places = sorted(range(len(rows)), key=lambda row: (not flags[row], rows[row]))
        with_graph.append(rows[places[:most]])
        without.append(rows[places[most:]])
    # Forward, recomputation of the blocks, and a backward that makes no gradient of parameters: as much as a forward.
    graph = phase_seconds(model, with_graph, 3, sent_by(**shape(model), backward=True), layout)
    rest = phase_seconds(model, without, 1, sent_by(**shape(model)), layout)
    return graph[0] + rest[0], graph[1] + rest[1]


def generation_seconds(model: Model, responses: np.ndarray) -> float:
    """Of one engine on one GPU: for each token it reads its weights and the keys and values of all active rows, and it takes
    up waiting rows while there is room for a quarter of the longest response."""
    rate, a_token, stride = MEMORY_BANDWIDTH * DECODING_SHARE, cache_bytes(model), 128
    room = LONGEST // 4
    done, started, seconds = np.zeros(len(responses)), 0, 0.0
    active = np.zeros(len(responses), dtype=bool)
    while started < len(responses) or active.any():
        held = (done[active] + MEAN_PROMPT).sum()
        while started < len(responses) and (held + MEAN_PROMPT + room) * a_token <= CACHE:
            active[started] = True
            held += MEAN_PROMPT + room
            started += 1
        steps = min(stride, int((responses - done)[active].min()))
        read = 2 * parameters(model) + a_token * (done[active] + MEAN_PROMPT + steps / 2).sum()
        seconds += steps * read / rate
        done[active] += steps
        active &= done < responses
    return float(seconds)


def shape(model: Model) -> dict[str, Any]:
    """What :func:`sent_by` needs to know of it."""
    return {"blocks": model.layers, "whole": parameters(model), "tied": model.tied}


def step(model: Model, layout: Layout, seed: int = 0) -> dict[str, float]:
    """One step of ROWS responses, in seconds."""
    lengths, selected = draw(np.random.default_rng(seed))
    engines = [generation_seconds(model, rows) for rows in (lengths - MEAN_PROMPT).reshape(layout.gpus, -1)]
    verls = verls_order(lengths, layout.ranks)
    own = in_ranks(verls, lengths, layout.ranks)
    plain, sent = phase_seconds(model, own, 1, sent_by(**shape(model)), layout)
    update, _ = phase_seconds(model, own, 4, sent_by(**shape(model), backward=True), layout)
    scatter = sending_seconds(sent_by(**shape(model), step=True), layout.gpus, layout.ring)
    order = spread(lengths.tolist(), selected.tolist(), layout.ranks)
    dealt, sent_with = shared_forward(model, lengths, selected, order, layout)
    undealt, _ = shared_forward(model, lengths, selected, verls, layout)
    even = 2 * forward_operations(model, lengths[selected]).sum() / layout.ranks / layout.speed
    return {
        "rows": ROWS / layout.ranks,
        "generation": max(engines),
        "waiting": max(engines) - float(np.mean(engines)),
        "old_log_probs": plain,
        "update": EPOCHS * (update + scatter),
        "saliency": dealt - plain,
        "saliency_in_verls_order": undealt - plain,
        "saliency_even": float(even),
        "gathered": 2 * sent.gathered,
        "gathered_with_saliency": 2 * sent_with.gathered,
        "gathering": sending_seconds(sent_by(**shape(model)), layout.gpus, layout.ring),
        "verls_driver": driver_rates()["verl"] * padded(lengths),
        "driver": driver_seconds(lengths, selected),
    }


# ---- the driver ----


def measured() -> dict[str, Any]:
    """What benchmarks/bench_scaling.py found."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))


def driver_bytes(lengths: np.ndarray, selected: np.ndarray) -> dict[str, int]:
    """What GRAIL's part of the trainer fetches from TransferQueue and puts there in a step."""
    counted = measured()["traffic"]["ours"]
    by = {
        "rows": len(lengths),
        "prompt tokens": len(lengths) * MEAN_PROMPT,
        "response tokens": int((lengths - MEAN_PROMPT).sum()),
        "selected rows": len(selected),
        "selected tokens": int(lengths[selected].sum()),
    }
    return {way: sum(counted[way][unit] * number for unit, number in by.items()) for way in ("get", "put")}


def driver_seconds(lengths: np.ndarray, selected: np.ndarray) -> float:
    """Of the trainer's own work on the batch, and of fetching and putting, on one core of the machine that measured."""
    rates = driver_rates()
    size = driver_bytes(lengths, selected)
    return rates["work"] * padded(lengths) + size["get"] / rates["get"] + size["put"] / rates["put"]


def padded(lengths: np.ndarray) -> int:
    """Tokens of a batch's arrays, which are as long as its longest response."""
    return len(lengths) * int((lengths - MEAN_PROMPT).max())


def by_size(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured batches, the smallest first."""
    return sorted(batches, key=lambda size: size["rows"] * size["tokens"])


@cache
def driver_rates() -> dict[str, float]:
    """Seconds a token of the largest measured batch, which has the most a token, since large arrays are of fresh pages; and
    bytes a second of the second largest transfer."""
    known = by_size(measured()["driver"])[-1]
    queue = sorted(measured()["queue"], key=lambda size: size["bytes"])[-2]
    return {
        "work": known["seconds"] / (known["rows"] * known["tokens"]),
        "verl": known["verl"] / (known["rows"] * known["tokens"]),
        "get": queue["bytes"] / queue["get"],
        "put": queue["bytes"] / queue["put"],
    }


# ---- measured points ----


def fitted_ring(points: list[dict[str, Any]], ranks: int) -> Ring:
    """Hop and bandwidth that go with the measured seconds on so many ranks, by least squares of the relative errors."""
    own = [point for point in points if point["ranks"] == ranks]
    rows = np.array([[(ranks - 1), point["bytes"] * (ranks - 1) / ranks] for point in own])
    seconds = np.array([point["seconds"] for point in own])
    hop, inverse = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(own)), rcond=None)[0]
    return Ring(1 / max(inverse, 1e-15), max(hop, 0.0))


def on_one_machine(ring: Ring, ranks: int) -> Ring:
    """The ring of so many ranks that have the processors and the memory of the two that it was measured with."""
    return Ring(ring.bandwidth * 2 / ranks, ring.hop * ranks / 2)


def points() -> list[tuple[str, str, float, float]]:
    """What was measured, what of it the model knows, and both figures: those it was fitted to are not among them."""
    found = measured()
    rows = []
    for kind, name in (("gather", "all-gather"), ("scatter", "reduce-scatter")):
        own = [point for point in found["gloo"] if point["kind"] == kind]
        ring = on_one_machine(fitted_ring(own, 2), 4)
        for point in own:
            if point["ranks"] == 4:
                label = f"gloo, {name} of {point['bytes'] / 2**20:g} MiB, four ranks"
                rows.append((label, "two ranks", ring.seconds(point["bytes"], 4), point["seconds"]))
    *others, known = by_size(found["driver"])
    for size in others:
        label = f"driver's work on {size['rows']} x {size['tokens']} tokens"
        predicted = driver_rates()["work"] * size["rows"] * size["tokens"]
        rows.append((label, f"{known['rows']} x {known['tokens']} tokens", predicted, size["seconds"]))
    largest = max(found["queue"], key=lambda size: size["bytes"])
    for way in ("put", "get"):
        label = f"TransferQueue, {way} {largest['bytes'] / 2**20:g} MiB"
        rows.append((label, "a quarter of it", largest["bytes"] / driver_rates()[way], largest[way]))
    return rows


# ---- the page ----


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]


Found = dict[str, dict[Layout, dict[str, float]]]


def steps(model: Model) -> dict[Layout, dict[str, float]]:
    """By layout."""
    return {layout: step(model, layout) for layout in (Layout(*sizes) for sizes in LAYOUTS)}


def without(one: dict[str, float]) -> float:
    """Seconds of a step without token weights."""
    return one["generation"] + one["old_log_probs"] + one["update"] + one["verls_driver"]


def extra(one: dict[str, float]) -> float:
    """Seconds that token weights add."""
    return one["saliency"] + one["driver"]


def named(layout: Layout) -> str:
    return f"{layout.gpus}" + (f", {layout.together} a sequence" if layout.together > 1 else "")


def page(found: Found) -> str:
    """The generated part of docs/scaling.md."""
    predicted, balance = [], []
    for key, by_layout in found.items():
        for layout, one in by_layout.items():
            name = [key, named(layout)]
            predicted.append([
                *name, f"{one['rows']:.0f}", f"{one['generation']:.0f} ({one['waiting']:.0f})", f"{one['old_log_probs']:.1f}",
                f"{one['update']:.1f}", f"{one['verls_driver']:.1f}", f"{one['saliency']:.1f}", f"{one['driver']:.1f}",
                f"{100 * extra(one) / without(one):.1f} %",
            ])  # fmt: skip
            balance.append([
                *name, *(f"{one[way]:.1f}" for way in ("saliency_even", "saliency", "saliency_in_verls_order")),
                *(f"{one[size] / 1e9:.0f}" for size in ("gathered", "gathered_with_saliency")), f"{one['gathering']:.2f}",
            ])  # fmt: skip
    lines = [
        "Predicted, not measured: seconds of a step.",
        "",
        *table(
            ["model", "GPUs", "rows a rank", "generation (waiting for the longest)", "old log-probabilities", "update",
             "driver, verl's part", "saliency", "driver, token weights", "token weights add"], predicted,
        ),
        "",
        "Predicted: what the saliency adds to the old log-probabilities, and what these gather.",
        "",
        *table(
            ["model", "GPUs", "arithmetic alone, s", "rows as a run deals them, s", "rows as verl deals them, s",
             "GB a rank gathers without saliency", "with", "gathering all parameters once, s"], balance,
        ),
        "",
    ]  # fmt: skip
    deviations = points()
    worst = max(deviations, key=lambda point: abs(point[2] / point[3] - 1))
    rows = [
        [label, known, f"{predicted:.3g} s", f"{seen:.3g} s", f"{100 * (predicted / seen - 1):+.0f} %"]
        for label, known, predicted, seen in deviations
    ]
    lines += [
        f"The model against what was measured here ({measured()['hardware']}, {measured()['date']}); largest deviation "
        f"{100 * (worst[2] / worst[3] - 1):+.0f} %, {worst[0]}.",
        "",
        *table(["measured", "the model knows", "predicted", "measured", "deviation"], rows),
        "",
    ]
    counted = measured()["traffic"]
    rows = [
        [{"ours": "token weights", "verl": "verl's own two stages"}[who], way, *(f"{counted[who][way][unit]:g}" for unit in (
            "response tokens", "prompt tokens", "selected tokens", "selected rows", "rows"))]
        for who in ("ours", "verl") for way in ("get", "put")
    ]  # fmt: skip
    lines += [
        *table(
            [
                "through the driver, bytes",
                "",
                "a response token",
                "a prompt token",
                "a token of a selected row",
                "a selected row",
                "a row",
            ],
            rows,
        ),
        "",
    ]
    rows = [
        [
            f"{size['rows']} x {size['tokens']}",
            f"{size['seconds']:.1f}",
            f"{size['verl']:.1f}",
            f"{size['peak_bytes_more'] / 1e9:.1f}",
        ]
        for size in measured()["driver"]
    ]
    lines += table(
        [
            "responses x tokens",
            "token weights, processor seconds",
            "verl's own two stages",
            "memory that a step adds, GB",
        ],
        rows,
    )
    return "\n".join(lines)


def draw_figure(found: dict[Layout, dict[str, float]], name: str) -> None:
    """Where a step's seconds go, by number of GPUs, as shares of the step without token weights."""
    from matplotlib import pyplot

    parts = {
        "generation": "#9aa5b1", "old_log_probs": "#5b7083", "update": "#24292f", "verls_driver": "#d9c8a9",
        "saliency": "#0b6e4f", "driver": "#c8553d",
    }  # fmt: skip
    labels = {
        "old_log_probs": "old log-probabilities", "verls_driver": "driver: verl", "driver": "driver: token weights",
    }  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(7.2, 3.0), layout="constrained")
    places = np.arange(len(found))[::-1]
    left = np.zeros(len(found))
    for part, colour in parts.items():
        shares = np.array([100 * one[part] / without(one) for one in found.values()])
        axes.barh(places, shares, left=left, color=colour, label=labels.get(part, part), height=0.6)
        left += shares
    for place, total, one in zip(places, left, found.values(), strict=True):
        axes.text(total + 1, place, f"{without(one):.0f} s + {extra(one):.1f} s", va="center", fontsize=9)
    axes.axvline(100, color="#24292f", linewidth=0.8, linestyle=":")
    names = [
        f"{layout.gpus} GPUs" + (f"\n{layout.together} a sequence" if layout.together > 1 else "") for layout in found
    ]
    axes.set(yticks=places, yticklabels=names, xlim=(0, 1.25 * max(left)))
    axes.set_xlabel("% of a step without token weights; predicted")
    axes.set_title(f"{name}, {ROWS} responses of up to {LONGEST} tokens", fontsize=10, loc="left")
    figure.legend(ncols=6, fontsize=8, frameon=False, loc="outside lower center", handlelength=1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(FIGURE, dpi=150, metadata={"Software": None})


SHOWN = ("qwen3-4b", "qwen3-8b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page, and draw its figure")
    args = parser.parse_args()
    found = {key: steps(MODELS[key]) for key in SHOWN}
    if args.write is None:
        print(page(found))
        return
    write_marked(args.write, "scaling", page(found))
    draw_figure(found[SHOWN[-1]], MODELS[SHOWN[-1]].path)


if __name__ == "__main__":
    main()
