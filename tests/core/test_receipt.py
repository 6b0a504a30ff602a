"""The receipt against independent computations, its table against faults, and its silence where nothing is wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor
from torch.testing import assert_close

from grail_advantage.receipt import (
    Batch,
    Finding,
    Loss,
    Piece,
    Watch,
    check,
    verl_loss,
)
from grail_advantage.receipt.check import ks_distance, percentiles
from grail_advantage.receipt.report import main, read, write
from tests.core.receipt_faults import MADE_UP, THREADS, cells, misnamed, quiet, rank_tokens
from tests.core.receipt_loop import (
    TOKEN_MEAN,
    Rollout,
    names,
    receipt_of,
    rollout,
    totals_of,
    train,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "receipt.md").read_text()


def test_each_fault_of_history_is_seen_and_the_first_line_is_right():
    results = list(cells(THREADS))
    # None is missed, and at most one in twenty has another first line.
    assert len(THREADS) == 30 and all(names for _, names, _ in results)
    assert len(misnamed(results)) <= 0.05 * len(results), misnamed(results)


@pytest.mark.slow
def test_nothing_is_missed_and_each_example_differs():
    results = list(cells(MADE_UP, stride=2))
    assert len(results) > 60 and all(names for _, names, _ in results)
    assert len(misnamed(results)) <= 0.03 * len(results), misnamed(results)
    # Structure comes first, then what covers most tokens.
    for _, _, receipt in results:
        structure = ("missing", "repeated", "not finite")
        order = [
            (not f.mismatch, f.name not in structure, -f.tokens) for f in receipt.findings
        ]
        assert order == sorted(order)
        for finding in receipt.findings:
            for _, _, intended, received in finding.examples:
                assert not abs(intended - received) <= 1e-6 * abs(intended)
                assert "-0.0" not in (str(intended), str(received))


@pytest.mark.slow
def test_no_alarm_in_clean_loops():
    alarms = [
        (setting, receipt.findings) for setting, receipt in quiet(60) if not receipt.ok
    ]
    assert alarms == []


def test_the_tables_of_the_page_are_what_the_command_prints(tmp_path, capsys):
    sizes = {"responses": 64, "tokens": 200, "ties": True, "token_advantages": False}
    for place, receipt in enumerate(
        (
            receipt_of(rollout(1, ranks=2, **sizes), divisor=rank_tokens),
            receipt_of(rollout(1, epochs=2, **sizes)),
        )
    ):
        path = tmp_path / str(place) / "receipts.jsonl"
        path.parent.mkdir()
        write(path, receipt, "ppo", 3)
        assert main([str(path)]) == (not receipt.ok)
        # The page names the file without its folder.
        printed = (
            capsys.readouterr().out.replace(f"{path.parent}/", "").split("\n\nMeasured:")[0]
        )
        assert f"```\n{printed}\n```" in PAGE, printed


SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("mask_BT.sum())", "24)"),
        ("mask_BT.sum())", "mask_BT[rows_b].sum())"),
        ("-ratio_bT", "-ratio_bT.detach() + 0 * ratio_bT"),
        ('"token-mean"', '"token-sum"'),
    ],
)
def test_the_pages_own_test_passes_and_fails_with_each_fault(text, fault):
    """It runs as it stands; the absolute number alone sees a factor that the receipt's divisor shares."""
    (source,) = [code for code in SNIPPETS if "def test_" in code]
    scope: dict[str, Any] = {}
    exec(source, scope)
    scope["test_each_token_receives_its_advantage"]()
    # The same test with one fault of a loss.
    exec(source.replace(text, fault), scope)
    with pytest.raises(AssertionError):
        scope["test_each_token_receives_its_advantage"]()


def test_the_snippet_of_the_page_runs(tmp_path, monkeypatch):
    """With a model in place of the reader's own, whose loss has no fault."""
    monkeypatch.chdir(tmp_path)
    (source,) = [code for code in SNIPPETS if "micro_batches" in code]
    batch = rollout(5, token_advantages=False).batch
    policy_BT = batch.old_log_probs_BT.clone().requires_grad_()

    def loss(log_probs, rows):
        ratio = (log_probs - batch.old_log_probs_BT[rows]).exp()
        objective = ratio * batch.advantages_BT[rows] * batch.mask_BT[rows]
        return -objective.sum() / batch.mask_BT.sum()

    scope: dict[str, Any] = {
        **vars(batch),
        "optimizer": torch.optim.SGD([policy_BT], lr=0.0),
        "my_loss": loss,
        "micro_batches": torch.arange(8).split(3),
        "log_probs_of": policy_BT.__getitem__,
    }
    exec(source, scope)
    assert scope["receipt"].findings == ()


def test_a_function_in_place_of_a_formula():
    """By autograd, of a loss written down by hand: its slope is what the formula says that a token should receive."""

    def loss(t):
        ratio = (t.log_probs - t.old).exp()
        bounded = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * t.advantages, bounded * t.advantages) * t.weights

    declared = Loss("mine", loss)
    for seed in range(3):
        loop = rollout(
            seed, epochs=3, drift=0.5, weights=True, token_advantages=bool(seed % 2)
        )
        pieces = train(loop)
        by_formula = check(loop.batch, TOKEN_MEAN, pieces)
        by_function = check(loop.batch, declared, pieces)
        assert by_formula.findings == by_function.findings == () and by_formula.clipped
        assert_close(by_formula.expected_UBT, by_function.expected_UBT, equal_nan=True)
        halved = [replace(piece, gradient_bT=piece.gradient_bT / 2) for piece in pieces]
        assert names(check(loop.batch, declared, halved)) == ["scaled"]


def test_received_by_update_and_a_response_that_comes_twice():
    """Of 3 epochs of 2 updates each response is in 3, and what it received is the mean over these."""
    loop = rollout(32, updates=2, epochs=3)
    receipt = receipt_of(loop)
    assert receipt.ok and 0 < receipt.clipped < 0.6
    for row in range(8):
        held = [
            update
            for update, step in enumerate(loop.plan)
            if any(row in rows for _, rows in step)
        ]
        is_held_U = receipt.received_UBT[:, row].isfinite().all(dim=1)
        assert is_held_U.nonzero().flatten().tolist() == held and len(held) == 3
        mean_T = receipt.received_UBT[held, row].mean(0)
        assert_close(mean_T, receipt.received_BT[row])
    # Every micro-batch comes a second time.
    twice = check(loop.batch, TOKEN_MEAN, train(loop) * 2)
    assert_close(twice.clipped_BT, receipt.clipped_BT)
    assert names(twice)[0] == "repeated"


def only(piece: Piece, rows: Tensor) -> Piece:
    """A piece's responses that are among the rows; their places are those in the rows."""
    at = torch.isin(piece.rows_b, rows)
    return replace(
        piece,
        rows_b=torch.searchsorted(rows, piece.rows_b[at]),
        log_probs_bT=piece.log_probs_bT[at],
        gradient_bT=piece.gradient_bT[at],
    )


def test_a_part_of_an_updates_responses():
    """A host that reads some responses gives the totals of all."""
    loop = rollout(33, updates=2, even=True)
    pieces = train(loop)
    # Three of eight responses; some micro-batches have none of them.
    rows = torch.tensor([1, 2, 5])
    columns = {
        name: values[rows]
        for name, values in vars(loop.batch).items()
        if isinstance(values, Tensor)
    }
    columns["totals_U2"] = totals_of(loop)
    parts = [only(piece, rows) for piece in pieces]
    assert not all(len(piece.rows_b) for piece in parts)
    part = check(replace(loop.batch, **columns), TOKEN_MEAN, parts)
    assert part.ok and part.responses == (3, 8)
    expected = check(loop.batch, TOKEN_MEAN, pieces)
    assert_close(part.received_BT, expected.received_BT[rows])


def test_responses_that_are_left_out():
    """On purpose where the batch says so; they count in the divisor."""
    loop = rollout(34, token_advantages=False)
    is_zero_B = loop.batch.advantages_BT.abs().sum(1) == 0
    # The micro-batches hold the other responses alone.
    rows = (~is_zero_B).nonzero()[:, 0]
    pieces = []
    for piece in train(loop):
        part = only(piece, rows)
        pieces.append(replace(part, rows_b=rows[part.rows_b]))
    assert names(check(loop.batch, TOKEN_MEAN, pieces)) == ["missing"]
    batch = replace(loop.batch, left_out_B=is_zero_B)
    assert check(batch, TOKEN_MEAN, pieces).findings == ()


def test_structure_names_its_epochs():
    """The second of three has no piece, a prompt trains in the third, and response 1 is left out of all."""
    loop = rollout(35, epochs=3)
    pieces = [piece for piece in train(loop) if piece.update != 1]
    last = pieces[-1]
    pieces[-1] = replace(last, outside_b=torch.full((len(last.rows_b),), 0.1))
    batch = replace(loop.batch, left_out_B=torch.arange(8) == 1)
    places = {line.name: line.where for line in check(batch, TOKEN_MEAN, pieces).findings}
    assert places == {
        "missing": "epochs 2",
        "outside": "epochs 3",
        "lost": "epochs 1, 2, 3",
    }


@pytest.mark.parametrize("loss", [TOKEN_MEAN, verl_loss("kl_cov", "token-mean")])
def test_pieces_without_a_response(loss):
    loop = rollout(34)
    # None has the place 8.
    pieces = [only(piece, torch.tensor([8])) for piece in train(loop)]
    receipt = check(loop.batch, loss, pieces)
    assert names(receipt) == ["missing"]
    assert receipt.responses == (0, 8) and receipt.trained == 0 and receipt.clipped is None


def test_a_line_has_the_factor_where_it_is_constant_and_what_it_explains():
    loop = rollout(37, token_advantages=False, ties=True)
    # Every token at half, and the second one lost.
    scaled, lost = receipt_of(loop, times=0.5 * (torch.arange(12) != 1)).findings
    assert (scaled.name, lost.name) == ("scaled", "lost")
    assert [scaled.size, scaled.low, scaled.high] == pytest.approx([0.5] * 3)
    assert (lost.low, lost.high) == (0, 0)
    assert {token for _, token, *_ in lost.examples} == {1}
    assert scaled.explains + lost.explains == pytest.approx(1)
    # Two responses with a factor of their own.
    # The two that most tokens tell of.
    longest = (loop.batch.mask_BT & (loop.batch.advantages_BT != 0)).sum(1).topk(2).indices
    factors_B1 = torch.ones(8, 1)
    factors_B1[longest] = torch.tensor([[1.7], [0.4]])
    (line,) = receipt_of(loop, times=lambda m: factors_B1[m.rows]).findings
    assert line.name == "scaled by response"
    assert line.where.startswith("constant in each response, 2 of 8")
    assert (line.low, line.high) == pytest.approx((0.4, 1.7))


def test_structure_alone_of_an_unknown_loss():
    loop = rollout(35)
    unknown = verl_loss("somebody's own", "token-mean")
    pieces = train(loop, lambda m: (m.log_probs.square() * m.mask).sum())
    receipt = check(loop.batch, unknown, pieces)
    assert receipt.ok and [finding.name for finding in receipt.findings] == ["unknown loss"]
    assert receipt.expected_UBT.isnan().all() and receipt.received_BT.isfinite().all()
    assert receipt.clipped is None
    # Padding trains as well.
    pieces = train(loop, lambda m: m.log_probs.square().sum())
    assert names(check(loop.batch, unknown, pieces)) == ["outside"]


@pytest.mark.parametrize(("factor", "name"), [(0.0, "lost"), (math.nan, "not finite")])
def test_a_lost_update(factor, name):
    loop = rollout(46, epochs=2)
    pieces = [
        replace(piece, gradient_bT=factor**piece.update * piece.gradient_bT)
        for piece in train(loop)
    ]
    (line,) = check(loop.batch, TOKEN_MEAN, pieces).findings
    assert (
        line.name == name
        and math.isfinite(line.size)
        and "in optimiser steps 2" in line.where
    )


def test_rounding_is_no_mismatch():
    """bf16 in gradients or advantages; bf16 policies are in the clean loops."""
    findings = set()
    for seed in range(3):
        loop = rollout(seed, epochs=3, token_advantages=bool(seed % 2))
        narrow = [replace(p, gradient_bT=p.gradient_bT.bfloat16()) for p in train(loop)]
        findings |= {*check(loop.batch, TOKEN_MEAN, narrow).findings}
        rounded = receipt_of(loop, advantages=lambda m: m.advantages.bfloat16().float())
        findings |= {*rounded.findings}
    notes = {(finding.name, finding.mismatch) for finding in findings}
    assert notes == {("rounded", False)}, list(map(str, findings))


@pytest.mark.parametrize("nudge", [-3e-6, 3e-6])
def test_a_ratio_on_the_bound_of_the_clip(nudge):
    """In the second epoch, of every other token: by rounding what is clipped in the loss is not for the receipt."""
    loop = rollout(45, epochs=2)
    old_BT = loop.batch.old_log_probs_BT - 0.3
    policy_UBT = loop.policy_UBT - 0.3
    # Every other token has the ratio 1.2, the bound.
    policy_UBT[1, :, ::2] = old_BT[:, ::2] + math.log(1.2)
    batch = replace(loop.batch, old_log_probs_BT=old_BT)
    pieces = [
        replace(piece, log_probs_bT=piece.log_probs_bT - 2 * nudge)
        for piece in train(Rollout(batch, policy_UBT + nudge, loop.plan))
    ]
    assert check(batch, TOKEN_MEAN, pieces).findings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_factor_that_is_seen(dtype):
    """As the receipt says, with advantages of 1."""
    loop = rollout(7, token_advantages=False, ties=True)
    pieces = train(loop)
    # The gradient as this type holds it.
    narrow = [replace(piece, gradient_bT=piece.gradient_bT.to(dtype)) for piece in pieces]
    clean = check(loop.batch, TOKEN_MEAN, narrow)
    assert clean.ok and 1.0001 < clean.seen_from < 1.07
    batch = replace(loop.batch, old_log_probs_BT=loop.policy_UBT[0].to(dtype).float())
    for share, expected in ((0.8, []), (1.3, ["scaled"])):
        factor = 1 + share * (clean.seen_from - 1)
        # The type of the log-probabilities tells the precision, too.
        scaled = [
            replace(
                piece,
                log_probs_bT=piece.log_probs_bT.to(dtype),
                gradient_bT=piece.gradient_bT.double() * factor,
            )
            for piece in pieces
        ]
        assert names(check(batch, TOKEN_MEAN, scaled)) == expected


def test_the_hook_goes_with_its_context_after_an_error_too():
    watched = Watch()
    with pytest.raises(KeyError), watched:
        log_probs = torch.zeros(2, 3, requires_grad=True) * 1.0
        watched.read(log_probs, [0, 1], rank=1, scale=4.0)
        log_probs.sum().backward(retain_graph=True)
        raise KeyError
    log_probs.sum().backward()
    (piece,) = watched.pieces
    # One backward of gradient 1, at the scale 4.
    assert piece.rank == 1 and torch.equal(piece.gradient_bT, torch.full((2, 3), 0.25))


def test_a_loss_that_is_watched_gives_the_same_and_its_narrow_micro_batches_are_padded():
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
    assert_close(receipt.received_BT, advantages)


def test_what_a_file_of_receipts_says(tmp_path, capsys):
    """What was written is read again, and the exit status tells faults and a run that did not train; of a loss without a
    formula nothing is claimed. JSON is strict."""
    loop = rollout(44, epochs=2, drift=0.5, responses=64)
    unknown = verl_loss("my_loss", "token-mean")
    idle = replace(loop, batch=replace(loop.batch, advantages_BT=torch.zeros(64, 12)))
    for name, receipt, status in (
        ("clean", receipt_of(loop), 0),
        ("fault", receipt_of(loop, times=0.5), 1),
        ("unknown", receipt_of(loop, unknown, times=-3.0), 0),
        ("idle", receipt_of(idle), 1),
        ("broken", receipt_of(loop, times=math.nan), 1),
    ):
        path = tmp_path / name
        write(path, receipt, "ppo", 3)
        (record,) = read(path, [])
        assert record["tokens"] == int(loop.batch.mask_BT.sum())
        assert record["responses"] == [64, 64] and record["clipped"] == receipt.clipped
        findings = [Finding.from_dict(finding) for finding in record["findings"]]
        # NaN is not equal to itself.
        assert name == "broken" or findings == [*receipt.findings]
        assert main([str(path)]) == status
        is_idle = "NOTHING TRAINED" in capsys.readouterr().out
        assert is_idle == (receipt.trained == 0) == (name in ("idle", "broken"))
        assert main([str(path), "--fail-on", "nothing"]) == 0
        capsys.readouterr()
        main([str(path), "--json"])
        printed = capsys.readouterr().out
        assert (
            len(json.loads(printed)["findings"]) == len(findings) and ": NaN" not in printed
        )


def test_a_file_without_a_receipt(tmp_path):
    # A record without its parts, and a line that is no JSON.
    (tmp_path / "nothing").write_text('{"step": 3}\nno json\n')
    assert main([str(tmp_path / "nothing")]) == main([str(tmp_path / "gone")]) == 2


@pytest.mark.nightly
def test_the_wheel_needs_torch_alone(tmp_path):
    """Built from the folder, and imported where nothing of the package can be."""
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    # setuptools leaves its build folder next to the source, hence the copy.
    source = tmp_path / "source"
    package = "packages/token-receipt"
    for name in (package, "grail_advantage/receipt", "grail_advantage/text_io"):
        shutil.copytree(ROOT / name, source / name)
    folders = (str(tmp_path), str(source / package))
    subprocess.run([sys.executable, *build, *folders], check=True)
    (wheel,) = tmp_path.glob("token_receipt-*.whl")
    script = """
import sys, torch
before = set(sys.modules)
from token_receipt import Batch, Loss, check, watch
from token_receipt.report import main
print({name.partition(".")[0] for name in set(sys.modules) - before} & {"grail_advantage", "numpy", "pyarrow"})
"""
    # Nothing else is on the path.
    environment = {"PYTHONPATH": str(wheel)}
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, cwd=tmp_path, env=environment) == b"set()\n"


@pytest.mark.parametrize("sizes", [1, 3, 1000])
def test_distances_of_distributions_are_scipys_whatever_the_order_of_equal_values(sizes):
    generator = np.random.default_rng(sizes)
    values = generator.integers(sizes, size=60).astype(float)
    is_part = generator.random(60) < 0.4
    expected = ks_2samp(values[is_part], values[~is_part]).statistic
    for order in (np.arange(60), generator.permutation(60)):
        distance = ks_distance(torch.tensor(values[order]), torch.tensor(is_part[order]))
        assert distance == pytest.approx(expected, abs=1e-12)


def test_percentiles_of_more_values_than_torch_takes():
    values_K = torch.arange(2**24 + 8, dtype=torch.float64)
    assert percentiles(values_K) == pytest.approx([0.01 * 2**24, 0.99 * 2**24], rel=1e-5)
