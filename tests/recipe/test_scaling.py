"""The simulation of many GPUs: its formulas against counts and plain loops, and its page."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from recipe.marked_text import marked
from tests import forked
from tests.recipe.test_sizing import config

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import bench_scaling  # noqa: E402
import scaling  # noqa: E402
import sizing  # noqa: E402

TOY = sizing.Model(
    "toy", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=256, tied=True, kind="llama",
    script="run_qwen3_grail.sh",
)  # fmt: skip


@pytest.mark.slow
def test_what_fsdp2_sends_is_what_it_sends_in_verls_engine(tmp_path: Path) -> None:
    """Counted on the engine, as rank 0 of four, without and with a backward to the embeddings, and in an update."""
    from tests.verl_ext import traffic
    from tests.verl_ext.test_saliency_pass import MODELS, tiny_model
    from tests.verl_ext.test_shared_forward import BATCH, _row

    for name in {setup.model for setup in traffic.SETUPS.values()}:
        tiny_model(seed=0, **MODELS[name]).save_pretrained(tmp_path / name)
    torch.save([_row(rollout) for rollout in BATCH][: traffic.ROWS], tmp_path / "rows.pt")
    done = forked.run("tests.verl_ext.traffic", "4", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, found in json.loads((tmp_path / "traffic.json").read_text()).items():
        shape = {"blocks": found["blocks"], "whole": found["whole"], "tied": name == "tied"}
        expected = {
            "forward": scaling.sent_by(**shape) * traffic.ROWS,
            "graph": scaling.sent_by(**shape, backward=True) * traffic.ROWS,
            "update": scaling.sent_by(**shape, backward=True) * 2 + scaling.sent_by(**shape, step=True),
        }
        for kind, sent in expected.items():
            calls, elements = found[kind]["calls"], found[kind]["elements"]
            assert (calls["gather"], calls.get("scatter", 0)) == (sent.gathers, sent.scatters), (name, kind)
            # The last slice of each parameter is padded.
            assert sent.gathered <= elements["gather"] <= 1.02 * sent.gathered
            assert sent.scattered <= elements.get("scatter", 0) <= 1.02 * sent.scattered


@pytest.mark.parametrize("length", [16, 200])
def test_operations_are_those_of_the_model(length: int) -> None:
    """torch counts attention without the causal half, the product of the rotary angles, and no norms."""
    model = AutoModelForCausalLM.from_config(config(TOY, attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    attention = 2 * TOY.layers * TOY.heads * TOY.head_dim * length**2
    norms = 2 * length * sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    (computed,) = scaling.forward_operations(TOY, np.array([length]))
    rotary = TOY.head_dim * length
    assert counter.get_total_flops() == computed + attention + rotary - norms


def test_a_ring_by_hand() -> None:
    """Three further ranks, and three quarters of the bytes."""
    assert scaling.Ring(bandwidth=100.0, hop=0.5).seconds(80, 4) == 3 * 0.5 + 60 / 100
    sent = scaling.Sent(gathers=2, gathered=40, scatters=1, scattered=20)
    ring = scaling.Ring(bandwidth=100.0, hop=0.5)
    # Two gathers of 20 elements of 2 bytes, one scatter of 20 elements of 4 bytes.
    assert scaling.sending_seconds(sent, 4, ring) == pytest.approx(2 * (1.5 + 30 / 100) + 1.5 + 60 / 100)
    assert scaling.sending_seconds(sent, 1, ring) == 0
    assert scaling.Layout(8).ring.bandwidth > scaling.Layout(64).ring.bandwidth


def test_a_ring_is_found_again() -> None:
    true = scaling.Ring(3e8, 2e-4)
    points = [{"ranks": 2, "bytes": size, "seconds": true.seconds(size, 2)} for size in (2**16, 2**20, 2**24)]
    found = scaling.fitted_ring(points, 2)
    assert (found.bandwidth, found.hop) == (pytest.approx(3e8), pytest.approx(2e-4))


def test_a_phase_waits_for_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, micro-batches of one row or two: worked out by hand."""
    monkeypatch.setattr(scaling, "MICRO_BATCH_TOKENS", 100)
    monkeypatch.setattr(scaling, "forward_operations", lambda model, lengths: lengths * 1.0)
    layout = scaling.Layout(2)
    ranks = [np.array([90, 50, 30]), np.array([20, 20, 10])]
    # The first rank needs two micro-batches, 90 and 50 + 30; the second has as many, 20 + 10 and 20.
    seconds, sent = scaling.phase_seconds(TOY, ranks, 1, scaling.Sent(5, 0), layout)
    assert sent == scaling.Sent(10, 0)
    # Gathering takes longer than so little arithmetic.
    assert seconds == pytest.approx(2 * 5 * scaling.HOP)
    monkeypatch.setattr(scaling, "HOP", 0.0)
    seconds, _ = scaling.phase_seconds(TOY, ranks, 1, scaling.Sent(5, 0), layout)
    assert seconds == pytest.approx((90 + 80) / layout.speed)


def test_the_saliency_costs_as_much_where_the_most_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has two selected rows, rank 1 none: it keeps the graph of its two shortest rows."""
    phases = []

    def phase(model: Any, ranks: list[np.ndarray], forwards: float, sent: Any, layout: Any) -> tuple[float, Any]:
        phases.append(([sorted(rows.tolist()) for rows in ranks], forwards, sent))
        return 1.0, sent

    monkeypatch.setattr(scaling, "phase_seconds", phase)
    lengths = np.array([10, 20, 30, 40, 50, 60])
    seconds, sent = scaling.shared_forward(TOY, lengths, np.array([2, 0]), [0, 2, 4, 5, 1, 3], scaling.Layout(2))
    assert seconds == 2.0
    forward = scaling.sent_by(**scaling.shape(TOY))
    assert phases[0] == ([[10, 30], [20, 40]], 3, forward * 2)
    assert phases[1] == ([[50], [60]], 1, forward)
    assert sent == forward * 3


def test_generation_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop over single tokens, with room for three rows at once."""
    monkeypatch.setattr(scaling, "LONGEST", 40)
    a_token = sizing.cache_bytes(TOY)
    monkeypatch.setattr(scaling, "CACHE", 3.0 * a_token * (sizing.MEAN_PROMPT + 20))
    responses = np.array([30, 7, 12, 40, 3])
    waiting, active, expected = responses.tolist(), [], 0.0
    while waiting or active:
        # Rows are taken up when one has ended.
        held = sum(sizing.MEAN_PROMPT + done for _, done in active)
        while waiting and (held + sizing.MEAN_PROMPT + 10) * a_token <= scaling.CACHE:
            active.append([waiting.pop(0), 0])
            held += sizing.MEAN_PROMPT + 10
        steps = min(length - done for length, done in active)
        for _ in range(steps):
            cached = sum(sizing.MEAN_PROMPT + done + 0.5 for _, done in active)
            expected += (2 * sizing.parameters(TOY) + a_token * cached) / (3.35e12 * 0.6)
            active = [[length, done + 1] for length, done in active]
        active = [row for row in active if row[1] < row[0]]
    assert scaling.generation_seconds(TOY, responses) == pytest.approx(expected)


def test_the_drivers_bytes_are_those_of_the_real_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a batch that the benchmark did not count with."""
    from verl.trainer.ppo.v1 import trainer_base

    from grail_advantage.verl_ext import trainer as trainer_module

    for module, name in ((trainer_module, "tq"), (trainer_base, "tq"), (trainer_base, "calculate_debug_metrics")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setattr(scaling, "MEAN_PROMPT", 11)
    rng = np.random.default_rng(5)
    responses = rng.integers(40, 300, 2 * bench_scaling.GROUP)
    trainer = bench_scaling.trainer_with(responses.tolist(), [11] * len(responses), 0.4, bench_scaling.Clock("cpu"), 2)
    bench_scaling.run_step(trainer)
    columns = trainer.store.columns
    selected = [row for row, key in enumerate(columns["rm_scores"]) if columns["saliency_target"][key][1] > 0]
    assert 0 < len(selected) < len(responses)
    assert scaling.driver_bytes(responses + 11, np.array(selected)) == {
        way: trainer.store.moved["ours", way] for way in ("get", "put")
    }


def test_deviations_are_of_what_was_not_fitted() -> None:
    found = scaling.points()
    known = scaling.by_size(scaling.measured()["driver"])[-1]
    of_driver = f"{known['rows']} x {known['tokens']} tokens"
    assert {known for _, known, _, _ in found} == {"two ranks", of_driver, "a quarter of it"}
    assert not any(of_driver in label for label, *_ in found)
    assert all(math.isfinite(predicted) and predicted > 0 and seen > 0 for _, _, predicted, seen in found)


@pytest.mark.slow
def test_the_page_is_current() -> None:
    """Seeded, so that it comes out the same; run python scripts/scaling.py --write docs/scaling.md."""
    found = {key: scaling.steps(sizing.MODELS[key]) for key in scaling.SHOWN}
    assert marked((ROOT / "docs/scaling.md").read_text(), "scaling") == scaling.page(found)
    for by_layout in found.values():
        for one in by_layout.values():
            assert one["saliency"] >= 0.99 * one["saliency_even"] > 0
