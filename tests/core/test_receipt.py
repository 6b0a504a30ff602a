"""The receipt against independent computations, its table against faults, and its silence where nothing is wrong."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grail_advantage.receipt import (
    Batch,
    Finding,
    Loss,
    Piece,
    Tokens,
    Watch,
    check,
    trl_loss,
    verl_loss,
    watch,
)
from grail_advantage.receipt.measure import Gradient
from grail_advantage.receipt.report import main, read, write
from tests.core.receipt_faults import MADE_UP, THREADS, cells, of_rank, quiet, wrong
from tests.core.receipt_loop import TOKEN_MEAN, Rollout, names, receipt_of, rollout, train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "receipt.md").read_text(encoding="utf-8")


def test_each_fault_of_history_is_seen_and_the_first_line_is_right() -> None:
    known = cells(THREADS)
    assert len(THREADS) == 30 and all(said for _, said, _ in known)
    assert len(wrong(known)) <= 0.05 * len(known), wrong(known)


@pytest.mark.slow
def test_nothing_is_missed_and_each_example_differs() -> None:
    known = cells(MADE_UP, every=2)
    assert len(known) > 60 and all(said for _, said, _ in known)
    assert len(wrong(known)) <= 0.03 * len(known), wrong(known)
    for _, _, receipt in known:
        structure = ("missing", "repeated", "not finite")
        order = [(not f.mismatch, f.name not in structure, -f.tokens) for f in receipt.findings]
        assert order == sorted(order)
        for _, _, intended, received in [
            example for f in receipt.findings for example in f.examples
        ]:
            assert abs(intended - received) > 1e-6 * abs(intended) or received != received
            assert str(intended) != "-0.0" and str(received) != "-0.0"


@pytest.mark.slow
def test_no_alarm_in_clean_loops() -> None:
    assert [
        (setting, *map(str, receipt.findings)) for setting, receipt in quiet(60) if not receipt.ok
    ] == []


def test_the_tables_of_the_page_are_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"responses": 64, "tokens": 200, "ties": True, "token_advantages": False}
    faulty = rollout(1, ranks=2, **sizes)
    receipts = [
        receipt_of(faulty, divisor=lambda micro: of_rank(faulty, micro)),
        receipt_of(rollout(1, epochs=2, **sizes)),
    ]
    for receipt in receipts:
        path = tmp_path / "receipts.jsonl"
        path.unlink(missing_ok=True)
        write(path, receipt, "ppo", 3)
        assert main([str(path)]) == (0 if receipt.ok else 1)
        printed = capsys.readouterr().out.replace(f"{tmp_path}/", "").split("\n\nMeasured:")[0]
        assert f"```\n{printed}\n```" in PAGE, printed


def test_the_pages_own_test_passes_and_fails_with_each_fault() -> None:
    """It runs as it stands; the absolute number alone sees a factor that the receipt's divisor shares."""
    (source,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def test_" in code
    ]
    for text, fault, fails in (
        ("", "", False),
        ("mask_BT.sum())", "24)", True),
        ("mask_BT.sum())", "mask_BT[rows_b].sum())", True),
        ("-ratio_bT", "-ratio_bT.detach() + 0 * ratio_bT", True),
        ('"token-mean"', '"token-sum"', True),
    ):
        scope: dict[str, Any] = {}
        exec(source.replace(text, fault) if text else source, scope)
        with pytest.raises(AssertionError) if fails else nullcontext():
            scope["test_each_token_receives_its_advantage"]()


def test_the_snippets_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a model in place of the reader's own: nothing to say; and with its loss divided twice, scaled."""
    monkeypatch.chdir(tmp_path)
    snippets = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "micro_batches" in code
    ]
    assert snippets
    for source in snippets:
        for divided in (1.0, 2.0):
            given = rollout(5, token_advantages=False)
            batch = given.batch
            policy_BT = given.policy_UBT[0].clone().requires_grad_()

            def loss(
                log_probs: Any, rows: Any, batch: Batch = batch, divided: float = divided
            ) -> torch.Tensor:
                objective = (log_probs - batch.old_log_probs_BT[rows]).exp() * batch.advantages_BT[
                    rows
                ]
                return -(objective * batch.mask_BT[rows]).sum() / batch.mask_BT.sum() / divided

            scope: dict[str, Any] = {
                "optimizer": torch.optim.SGD([policy_BT], lr=0.0),
                "my_loss": loss,
            }
            scope |= {
                f"{name}_BT": getattr(batch, f"{name}_BT")
                for name in ("advantages", "mask", "old_log_probs")
            }
            scope["micro_batches"] = torch.arange(8).split(3)
            scope["log_probs_of"] = policy_BT.__getitem__
            exec(source, scope)
            assert names(scope["receipt"].findings) == ([] if divided == 1 else ["scaled"])


BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
EPSILONS = {"epsilon": 0.2, "epsilon_high": 0.3}
LOSSES = {
    "sapo": trl_loss("sapo"),
    "clip": trl_loss("grpo", **EPSILONS),
    "delta 1.1": trl_loss("grpo", **EPSILONS, delta=1.1),
    "delta 1.6": trl_loss("grpo", **EPSILONS, delta=1.6),
    "cispo": verl_loss("cispo", "token-mean", **BOUNDS, kl="k3", kl_coef=0.1),
}
"""TRL's, and one of verl's, all of which ``verl_ext/test_receipt_losses.py`` has."""


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_token_should_receive_is_the_slope_of_its_loss(name: str) -> None:
    """By autograd, of a loss written down by hand: in the loop, and as a function in place of a formula."""

    def function(t: Tokens) -> torch.Tensor:
        ratio = (t.log_probs - t.old).exp()
        advantages = t.advantages
        gap = t.ref - t.log_probs
        tau = torch.where(advantages > 0, 1.0, 1.05)
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
        known = {
            "sapo": 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages,
            "clip": clipped,
            "cispo": ratio.clamp(0.8, 1.3).detach() * advantages * t.log_probs,
        }
        for delta in (1.1, 1.6):  # below and above what it clips
            of_delta = ratio.clamp(max=delta) * advantages
            known[f"delta {delta}"] = torch.minimum(of_delta, ratio.clamp(0.8, 1.3) * advantages)
        return (0.1 * (gap.exp() - gap - 1) if name == "cispo" else 0.0) - known[name] * t.weights

    loss = replace(LOSSES[name], aggregation="token-mean", over="update")
    for seed in range(3):
        given = rollout(seed, epochs=3, drift=0.5, weights=True, token_advantages=bool(seed % 2))

        def value(m: Any) -> torch.Tensor:
            tokens = Tokens(m.advantages, m.weights, m.mask, m.log_probs, m.old, m.ref)
            return (function(tokens) * m.mask).sum() / m.divisor

        pieces = train(given, value)
        by_formula, by_function = (
            check(given.batch, of, pieces) for of in (loss, Loss(name, function))
        )
        assert by_formula.findings == by_function.findings == () and (
            by_formula.clipped or name == "sapo"
        )
        torch.testing.assert_close(
            by_formula.expected_UBT, by_function.expected_UBT, equal_nan=True
        )
        halved = [replace(piece, gradient_bT=piece.gradient_bT / 2) for piece in pieces]
        assert names(check(given.batch, Loss(name, function), halved).findings) == ["scaled"]


def test_received_by_update_and_a_response_that_comes_twice() -> None:
    given = rollout(32, updates=2, epochs=3)
    receipt = receipt_of(given)
    assert receipt.ok and 0 < receipt.clipped < 0.6
    for row in range(8):
        held = [
            update for update, step in enumerate(given.plan) if any(row in rows for _, rows in step)
        ]
        received = receipt.received_UBT[:, row].isfinite().all(dim=1)
        assert received.nonzero().flatten().tolist() == held and len(held) == 3
        torch.testing.assert_close(
            receipt.received_UBT[held, row].mean(0), receipt.received_BT[row]
        )
    twice = check(given.batch, TOKEN_MEAN, [piece for piece in train(given) for _ in (1, 2)])
    assert (
        torch.allclose(twice.clipped_BT, receipt.clipped_BT)
        and names(twice.findings)[0] == "repeated"
    )


def test_part_of_an_updates_responses_and_those_left_out() -> None:
    """A host that reads some responses gives the totals of all; one left out counts in the divisor."""
    given = rollout(33, updates=2, even=True)
    pieces = train(given)
    kept = torch.tensor([1, 2, 5])
    steps = [torch.cat([rows for _, rows in step]) for step in given.plan]
    totals = torch.tensor([[int(given.batch.mask_BT[rows].sum()), len(rows)] for rows in steps])
    columns = {
        name: values[kept]
        for name, values in vars(given.batch).items()
        if isinstance(values, torch.Tensor)
    }

    def only(piece: Piece, there: torch.Tensor, rows: torch.Tensor) -> Piece:
        return replace(
            piece,
            rows_b=rows,
            **{k: getattr(piece, k)[there] for k in ("log_probs_bT", "gradient_bT")},
        )

    there = [torch.isin(piece.rows_b, kept) for piece in pieces]
    some = [
        only(p, at, torch.searchsorted(kept, p.rows_b[at]))
        for p, at in zip(pieces, there, strict=True)
    ]
    part = check(replace(given.batch, **columns, totals_U2=totals), TOKEN_MEAN, some)
    assert any(len(piece.rows_b) == 0 for piece in some) and part.ok and part.responses == (3, 8)
    torch.testing.assert_close(
        part.received_BT, check(given.batch, TOKEN_MEAN, pieces).received_BT[kept]
    )
    given = rollout(34, token_advantages=False)
    zero = given.batch.advantages_BT.abs().sum(1) == 0
    without = [only(p, ~zero[p.rows_b], p.rows_b[~zero[p.rows_b]]) for p in train(given)]
    assert names(check(given.batch, TOKEN_MEAN, without).findings) == ["missing"]
    assert check(replace(given.batch, left_out_B=zero), TOKEN_MEAN, without).findings == ()
    (lost,) = check(
        replace(given.batch, left_out_B=zero | (torch.arange(8) == 1)), TOKEN_MEAN, without
    ).findings
    assert lost.name == "lost" and lost.what.startswith("1 of 8 responses")


def test_a_line_has_the_factor_where_it_is_constant_and_what_it_explains() -> None:
    """Every token at half, and the second one lost."""
    given = rollout(37, token_advantages=False, ties=True)
    receipt = receipt_of(given, times=0.5 * (torch.arange(12) != 1))
    scaled, lost = receipt.findings
    assert (scaled.name, scaled.size, scaled.low, scaled.high) == (
        "scaled",
        *[pytest.approx(0.5)] * 3,
    )
    assert (lost.name, lost.low, lost.high) == ("lost", 0, 0) and {
        token for _, token, *_ in lost.examples
    } == {1}
    assert scaled.explains + lost.explains == pytest.approx(1)
    longest = (given.batch.mask_BT & (given.batch.advantages_BT != 0)).sum(1).topk(2).indices
    factors = torch.ones(8, 1).index_put((longest,), torch.tensor([[1.7], [0.4]]))
    (line,) = receipt_of(given, times=lambda m: factors[m.rows]).findings
    assert line.name == "scaled by response" and line.where.startswith(
        "constant in each response, 2 of 8"
    )
    assert (line.low, line.high) == (pytest.approx(0.4), pytest.approx(1.7))


def test_structure_alone_of_an_unknown_loss_prompts_that_train_and_a_lost_update() -> None:
    given = rollout(35)
    unknown = verl_loss("somebody's own", "token-mean")
    squares = check(
        given.batch, unknown, train(given, lambda m: (m.log_probs.square() * m.mask).sum())
    )
    assert squares.ok and [finding.name for finding in squares.findings] == ["unknown loss"]
    assert (
        squares.expected_UBT.isnan().all()
        and squares.received_BT.isfinite().all()
        and squares.clipped is None
    )
    of_padding = check(given.batch, unknown, train(given, lambda m: m.log_probs.square().sum()))
    assert names(of_padding.findings) == ["outside"]
    pieces = train(given)
    pieces[0] = replace(pieces[0], outside_b=torch.full((len(pieces[0].rows_b),), 0.1))
    assert names(check(given.batch, TOKEN_MEAN, pieces).findings) == ["outside"]
    given = rollout(46, epochs=2)
    for gone, name in ((0.0, "lost"), (math.nan, "not finite")):
        broken = [
            replace(p, gradient_bT=gone * p.gradient_bT) if p.update else p for p in train(given)
        ]
        (line,) = check(given.batch, TOKEN_MEAN, broken).findings
        assert (
            line.name == name and math.isfinite(line.size) and "in optimiser steps 2" in line.where
        )


def test_rounding_is_no_mismatch() -> None:
    """bf16 in gradients or advantages, and a ratio on the bound of the clip; bf16 policies are in the clean loops."""
    seen = set()
    for seed in range(3):
        given = rollout(seed, epochs=3, token_advantages=bool(seed % 2))
        coarse = given.batch.advantages_BT.bfloat16()
        narrow = [replace(p, gradient_bT=p.gradient_bT.bfloat16()) for p in train(given)]
        rounded = receipt_of(given, advantages=lambda m, c=coarse: c[m.rows].float())
        seen |= {*check(given.batch, TOKEN_MEAN, narrow).findings, *rounded.findings}
    assert {(finding.name, finding.mismatch) for finding in seen} == {("rounded", False)}, [
        str(each) for each in seen
    ]
    given = rollout(45, epochs=2)
    at_the_bound = given.batch.old_log_probs_BT - 0.3 + math.log(1.2)
    policy = given.policy_UBT - 0.3
    policy[1] = torch.where(torch.arange(12) % 2 == 0, at_the_bound, policy[1])
    batch = replace(given.batch, old_log_probs_BT=given.batch.old_log_probs_BT - 0.3)
    for nudge in (-3e-6, 3e-6):
        moved = Rollout(batch, policy + nudge, given.plan)
        shifted = [
            replace(piece, log_probs_bT=piece.log_probs_bT - 2 * nudge) for piece in train(moved)
        ]
        assert check(batch, TOKEN_MEAN, shifted).findings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_factor_that_is_seen(dtype: torch.dtype) -> None:
    """As the receipt says, with advantages of 1."""
    given = rollout(7, token_advantages=False, ties=True)
    pieces = train(given)
    clean = check(
        given.batch, TOKEN_MEAN, [replace(p, gradient_bT=p.gradient_bT.to(dtype)) for p in pieces]
    )
    assert clean.ok and 1.0001 < clean.seen_from < 1.07
    batch = replace(given.batch, old_log_probs_BT=given.policy_UBT[0].to(dtype).float())
    for share, expected in ((0.8, []), (1.3, ["scaled"])):
        # The type of the log-probabilities tells the precision too
        factor = 1 + share * (clean.seen_from - 1)
        scaled = [replace(p, gradient_bT=p.gradient_bT.double() * factor) for p in pieces]
        exact = [replace(p, log_probs_bT=p.log_probs_bT.to(dtype)) for p in scaled]
        assert names(check(batch, TOKEN_MEAN, exact).findings) == expected


def test_the_hook_reads_what_autograd_gives_changes_nothing_and_goes() -> None:
    policy = rollout(43).policy_UBT[0]
    factors = torch.arange(96.0).reshape(8, 12)
    leaf, plain = (policy.clone().requires_grad_() for _ in range(2))
    with watch() as watched:
        for rows in torch.arange(8).split(3):
            log_probs = leaf[rows] * 1.0
            watched.read(log_probs, rows)
            for of in (log_probs, plain[rows] * 1.0):
                (of.square() * factors[rows]).sum().backward()
    assert torch.equal(leaf.grad, plain.grad)
    received = torch.cat([piece.gradient_bT for piece in watched.pieces])
    torch.testing.assert_close(received, 2 * policy * factors)
    with torch.no_grad():
        assert Gradient(leaf * 1.0).values is None
    watched = Watch()
    with pytest.raises(KeyError), watched:
        first = torch.zeros(2, 3, requires_grad=True) * 1.0
        watched.read(first, [0, 1], rank=1, scale=4.0)
        first.sum().backward(retain_graph=True)
        raise KeyError
    first.sum().backward()
    (piece,) = watched.pieces
    assert piece.rank == 1 and torch.equal(piece.gradient_bT, torch.full((2, 3), 0.25))


def test_a_loss_that_is_watched_gives_the_same_and_its_narrow_micro_batches_are_padded() -> None:
    """The first response has 2 tokens, and goes through the loss alone; the second has 4."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    advantages = torch.where(mask.bool(), torch.tensor([[1.0], [-2.0]]), 0.0)
    watched = Watch()
    for row, width in enumerate((2, 4)):
        log_probs = torch.full((1, width), -1.0, requires_grad=True)
        loss = watched.around(
            lambda log_probs, advantages: -(log_probs * advantages).sum() / 6, [row]
        )
        value = loss(log_probs, advantages[row : row + 1, :width])
        assert value == advantages[row].sum() / 6
        value.backward()
    receipt = check(Batch(advantages, mask), TOKEN_MEAN, watched.pieces)
    assert receipt.ok
    torch.testing.assert_close(receipt.received_BT, advantages)


def test_what_a_file_of_receipts_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written is read again, and the exit status tells faults and a run that did not train; of a loss without a
    formula nothing is claimed. JSON is strict."""
    loop = rollout(44, epochs=2, drift=0.5, responses=64)
    idle = replace(
        loop, batch=replace(loop.batch, advantages_BT=torch.zeros_like(loop.batch.advantages_BT))
    )
    broken = [replace(piece, gradient_bT=piece.gradient_bT * math.nan) for piece in train(loop)]
    unknown = verl_loss("my_loss", "token-mean")
    for name, receipt, loss, status, on_note in (
        ("clean", receipt_of(loop), "ppo", 0, 0),
        ("fault", receipt_of(loop, times=0.5), "ppo", 1, 1),
        ("unknown", receipt_of(loop, unknown, times=-3.0), "my_loss", 0, 1),
        ("idle", receipt_of(idle), "ppo", 1, 1),
        ("broken", check(loop.batch, TOKEN_MEAN, broken), "ppo", 1, 1),
    ):
        path = tmp_path / name
        write(path, receipt, loss, 3)
        assert main([str(path)]) == status
        assert (
            ("NOTHING TRAINED" in capsys.readouterr().out)
            == (receipt.trained == 0)
            == (name in ("idle", "broken"))
        )
        assert main([str(path), "--fail-on", "note"]) == on_note
        assert main([str(path), "--fail-on", "nothing"]) == 0
        (record,) = read(path, [])
        assert record["tokens"] == int(loop.batch.mask_BT.sum()) and record["responses"] == [64, 64]
        assert record["clipped"] == receipt.clipped and (receipt.clipped is None) == (
            name == "unknown"
        )
        if name == "broken":
            continue
        assert [Finding.from_dict(finding) for finding in record["findings"]] == list(
            receipt.findings
        )
    capsys.readouterr()
    assert (
        main([str(tmp_path / "fault"), "--json"]) == main([str(tmp_path / "broken"), "--json"]) == 1
    )
    fault, not_finite = capsys.readouterr().out.split("\n}\n{")
    (line,) = json.loads(f"{fault}}}")["findings"]
    assert line["mismatch"] and line["low"] == pytest.approx(0.5)
    assert ": NaN" not in not_finite and '"received": null' in not_finite
    (tmp_path / "nothing").write_text('{"step": 3}\nno json\n')
    assert main([str(tmp_path / "nothing")]) == main([str(tmp_path / "gone")]) == 2


@pytest.mark.nightly
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    """Built from the folder, and imported where nothing of the package can be."""
    build = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    )
    subprocess.run([*build, str(ROOT / "packages" / "token-receipt")], check=True)
    (wheel,) = tmp_path.glob("token_receipt-*.whl")
    script = """
import sys, torch
before = set(sys.modules)
from token_receipt import Batch, Loss, check, watch
from token_receipt.report import main
print({name.partition(".")[0] for name in set(sys.modules) - before} & {"grail_advantage", "numpy", "pyarrow"})
"""
    run = {
        "cwd": tmp_path,
        "env": {"PYTHONPATH": str(wheel)},
        "capture_output": True,
        "text": True,
        "check": True,
    }
    assert subprocess.run([sys.executable, "-c", script], **run).stdout == "set()\n"
