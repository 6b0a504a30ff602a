"""The receipt against independent computations, its names against faults of history, and its silence where nothing is wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grail_advantage.receipt import Batch, Finding, Layout, Loss, Piece, Receipt, check, trl_loss, verl_loss, watch
from grail_advantage.receipt.changes import fitting_rows
from grail_advantage.receipt.endings import Endings
from grail_advantage.receipt.measure import Gradient
from tests.core.receipt_faults import FAULTS, TOKEN_MEAN, Fault, named, ppo, receipt_of, table, tokens_of
from tests.core.receipt_loop import MicroBatch, Rollout, names, rollout, train

DOCS = Path(__file__).parents[2] / "docs"
SEEDS = 3


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.thread)
def test_a_fault_of_history_is_named(fault: Fault) -> None:
    for seed in range(1, SEEDS + 1):
        found = named(fault, seed)
        assert found and found[0] in (fault.name, fault.also) and set(found) <= {fault.name, fault.also}, (seed, found)


def test_the_page_has_the_table_of_faults() -> None:
    assert table() in (DOCS / "dev" / "receipt_faults.md").read_text(encoding="utf-8")


def test_the_loop_of_the_page_runs() -> None:
    """With a model in place of the reader's own: nothing to say; and with its loss divided twice, scaled."""
    page = (DOCS / "receipt.md").read_text(encoding="utf-8")
    (source,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "watch" in code]
    assert len(source.strip().splitlines()) <= 13
    for divided in (1.0, 2.0):
        given = rollout(5, token_advantages=False)
        table_BT = given.policy_UBT[0].clone().requires_grad_()
        scope = {
            "advantages_BT": given.batch.advantages_BT,
            "mask_BT": given.batch.mask_BT,
            "old_log_probs_BT": given.batch.old_log_probs_BT,
            "optimizer": torch.optim.SGD([table_BT], lr=0.0),
            "micro_batches": torch.arange(8).split(3),
            "log_probs_of": lambda rows_b, table_BT=table_BT: table_BT[rows_b] * 1.0,
            "my_loss": lambda log_probs_bT, rows_b, given=given, divided=divided: (
                -(
                    (log_probs_bT - given.batch.old_log_probs_BT[rows_b]).exp()
                    * given.batch.advantages_BT[rows_b]
                    * given.batch.mask_BT[rows_b]
                ).sum()
                / given.batch.mask_BT.sum()
                / divided
            ),
        }
        exec(source, scope)
        assert names(scope["receipt"].findings) == ([] if divided == 1 else ["scaled"])


def test_the_row_that_fits_is_found_among_many() -> None:
    """As by comparing with all; half of the responses have the values of another one, and a few values fit none."""
    generator = torch.Generator().manual_seed(0)
    given_BT = torch.randn(300, 40, generator=generator, dtype=torch.float64)
    own_N, wanted_N = torch.arange(300), torch.cat([torch.arange(150), torch.randperm(150, generator=generator) + 150])
    wanted_NT = torch.where(torch.rand(300, 40, generator=generator) < 0.2, torch.nan, given_BT[wanted_N])
    wanted_NT[:, ::7] += 1
    close_NBT = (given_BT - wanted_NT[:, None]).abs() <= 1e-3 * wanted_NT[:, None].abs()
    assert fitting_rows(wanted_NT, given_BT, own_N, 1e-3).tolist() == close_NBT.sum(dim=2).argmax(dim=1).tolist()
    assert close_NBT.sum(dim=2).argmax(dim=1).tolist() == wanted_N.tolist()


# ------------------------------------------------------------------------------------------------- the account, by differences


def one_loss(kind: str, ratio: float, advantage: float) -> float:
    """A token's loss at a ratio, by hand."""
    if kind == "reinforce":
        return -advantage * torch.tensor(ratio).log().item()
    if kind == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau / (1 + 2.718281828459045 ** (-tau * (ratio - 1))) * advantage
    low, high, cap = 0.2, 0.3, 1.6
    value = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(value, -advantage * cap) if kind == "dual" and advantage < 0 else value


@pytest.mark.parametrize("kind", ["reinforce", "sapo", "clip", "dual"])
def test_what_a_token_should_receive_is_the_slope_of_its_loss(kind: str) -> None:
    loss = {
        "reinforce": verl_loss("gpg", "token-sum"),
        "sapo": Loss("sapo", "sapo", "token-sum", options={"tau_pos": 1.0, "tau_neg": 1.05}),
        "clip": trl_loss("grpo", epsilon=0.2, epsilon_high=0.3),
        "dual": verl_loss("vanilla", "token-sum", clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=1.6),
    }[kind]
    loss = replace(loss, aggregation="token-sum", over="update")
    for ratio in (0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 1.59, 1.61, 2.5):
        for advantage in (1.7, -0.6):
            step = 1e-4
            up, down = (one_loss(kind, ratio * (1 + sign * step), advantage) for sign in (1, -1))
            slope = (up - down) / (2 * step)
            one = torch.tensor([[ratio]], dtype=torch.float64).log() - 2.0
            batch = Batch(torch.full((1, 1), advantage), torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), -2.0))
            piece = Piece(torch.tensor([0]), one, torch.full((1, 1), slope, dtype=torch.float64))
            receipt = check(replace(batch, on_policy=False), loss, [piece])
            assert receipt.received_BT.item() == pytest.approx(-slope)
            assert receipt.expected_UBT.item() == pytest.approx(-slope, rel=1e-3, abs=1e-6), (ratio, advantage)
            assert bool(receipt.clipped_BT) == (slope == 0)


AGGREGATIONS = {
    "token-mean": lambda lengths, row: sum(lengths),
    "token-sum": lambda lengths, row: 1,
    "seq-mean-token-sum": lambda lengths, row: len(lengths),
    "seq-mean-token-mean": lambda lengths, row: len(lengths) * lengths[row],
    "seq-mean-token-sum-norm": lambda lengths, row: len(lengths) * 20,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_denominators_by_hand(aggregation: str, ranks: int) -> None:
    """Of one update over ranks and uneven micro-batches, on policy: what is received is the advantage."""
    given = rollout(31, ranks=ranks)
    lengths = given.batch.mask_BT.sum(1).tolist()
    divisors = torch.tensor([[float(AGGREGATIONS[aggregation](lengths, row))] for row in range(8)])
    loss = Loss("ppo", "clip", aggregation, norm=20.0, options={"low": 0.2, "high": 0.2})
    receipt = receipt_of(given, lambda micro: ppo(micro, divisors[micro.rows]) * ranks, loss)
    assert receipt.findings == ()
    torch.testing.assert_close(receipt.received_BT, torch.where(given.batch.mask_BT, given.batch.advantages_BT, 0.0))
    assert not receipt.clipped_BT.any()


def test_received_by_update_is_the_mean_of_the_updates_that_held_it() -> None:
    given = rollout(32, updates=2, epochs=3)
    receipt = receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    assert receipt.ok
    for row in range(8):
        held = [update for update, step in enumerate(given.plan) if any(row in rows for _, rows in step)]
        assert (
            len(held) == 3 and receipt.received_UBT[:, row].isfinite().all(dim=1).nonzero().flatten().tolist() == held
        )
        torch.testing.assert_close(receipt.received_UBT[held, row].mean(0), receipt.received_BT[row])
    assert 0 < receipt.clipped_BT.mean() < 0.6


def test_some_responses_of_an_update_and_empty_micro_batches() -> None:
    """A host that reads some responses gives the totals of all."""
    given = rollout(33, updates=2, even=True)
    pieces = train(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    kept = torch.tensor([1, 2, 5])
    totals = torch.tensor(
        [[int(given.batch.mask_BT[(rows := torch.cat([r for _, r in step]))].sum()), len(rows)] for step in given.plan]
    )
    columns = {name: values[kept] for name, values in vars(given.batch).items() if isinstance(values, torch.Tensor)}
    some = []
    for piece in pieces:
        there = torch.isin(piece.rows_b, kept)
        rows = torch.searchsorted(kept, piece.rows_b[there])
        some.append(
            replace(piece, rows_b=rows, log_probs_bT=piece.log_probs_bT[there], gradient_bT=piece.gradient_bT[there])
        )
    assert any(len(piece.rows_b) == 0 for piece in some)
    whole = check(given.batch, TOKEN_MEAN, pieces)
    part = check(replace(given.batch, **columns, layout=Layout(totals_U2=totals)), TOKEN_MEAN, some)
    assert part.ok and whole.ok
    torch.testing.assert_close(part.received_BT, whole.received_BT[kept])


def test_left_out_responses_count_in_denominators() -> None:
    given = rollout(34, token_advantages=False)
    pieces = train(given, lambda micro: ppo(micro, given.batch.mask_BT.sum()))
    zero = given.batch.advantages_BT.abs().sum(1) == 0
    without = [
        replace(p, rows_b=p.rows_b[k], log_probs_bT=p.log_probs_bT[k], gradient_bT=p.gradient_bT[k])
        for p in pieces
        if (k := ~zero[p.rows_b]).any()
    ]
    assert names(check(given.batch, TOKEN_MEAN, without).findings) == ["missing"]
    assert check(replace(given.batch, left_out_B=zero), TOKEN_MEAN, without).findings == ()
    trains = torch.arange(8) == 1
    findings = check(replace(given.batch, left_out_B=zero | trains), TOKEN_MEAN, without).findings
    assert names(findings) == ["lost"] and "1 of 8 responses are left out with an advantage" in findings[0].what


# ------------------------------------------------------------------------------------------------------------------- findings


def test_an_unknown_loss_is_checked_by_structure_alone() -> None:
    given = rollout(35)
    unknown = verl_loss("somebody's own", "token-mean")
    squares = receipt_of(given, lambda m: (m.log_probs.square() * m.mask).sum(), unknown)
    assert squares.ok and [finding.name for finding in squares.findings] == ["unknown loss"]
    assert squares.expected_UBT.isnan().all() and squares.received_BT.isfinite().all()
    everywhere = receipt_of(given, lambda m: m.log_probs.square().sum(), unknown)
    assert names(everywhere.findings) == ["outside"]


def test_a_property_that_a_loss_declares_is_a_note() -> None:
    given = rollout(36)
    declared = replace(trl_loss("bnpo", epsilon=0.2), account="clip")
    receipt = receipt_of(given, lambda micro: ppo(micro, micro.mask.sum() * micro.count), declared)
    (note,) = receipt.findings
    assert (note.name, note.mismatch) == ("scaled by micro-batch", False) and "as `bnpo` says" in note.what


def test_two_faults_are_both_named() -> None:
    given = rollout(37, token_advantages=False)

    def loss(micro: MicroBatch) -> torch.Tensor:
        mask = micro.mask & (torch.arange(12) != 1)  # the second token is lost
        return ppo(micro, tokens_of(given, micro) * 2, mask=mask)

    receipt = receipt_of(given, loss)
    assert names(receipt.findings) == ["scaled", "lost"]
    scaled, lost = receipt.findings
    assert scaled.size == pytest.approx(0.5) and {token for _, token, _, _ in lost.examples} == {1}
    assert all(received == 0 for *_, received in lost.examples)


def test_factors_without_a_rule_are_those_of_their_responses() -> None:
    """Two of eight responses have factors that no divisor explains; the others received what they should."""
    given = rollout(41, token_advantages=False)
    factors = torch.ones(len(given.batch.mask_BT), 1)
    trained = (given.batch.mask_BT & (given.batch.advantages_BT != 0)).sum(dim=1)
    most = trained.argsort(descending=True)[:2]
    factors[most, 0] = torch.tensor([1.7, 0.4])
    receipt = receipt_of(given, lambda m: ppo(m, tokens_of(given, m) / factors[m.rows]))
    (finding,) = receipt.findings
    assert (
        finding.name == "scaled by response" and "from 0.4 to 1.7 times what it should be, by response" in finding.what
    )
    assert {row for row, *_ in finding.examples} <= {str(row) for row in most.tolist()} | set(most.tolist())


def test_an_added_term_is_extra_with_its_share() -> None:
    given = rollout(38, token_advantages=False)

    def loss(micro: MicroBatch) -> torch.Tensor:
        supervised = (micro.log_probs * micro.mask).sum() / tokens_of(given, micro)
        return ppo(micro, tokens_of(given, micro)) - 0.1 * supervised

    (finding,) = receipt_of(given, loss).findings
    assert finding.name == "extra"
    received = torch.where(given.batch.mask_BT, given.batch.advantages_BT + 0.1, 0.0)
    share = 0.1 * given.batch.mask_BT.sum().sqrt() / received.norm()
    assert finding.size == pytest.approx(float(share), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_added_is_told_from_what_is_multiplied(seed: int) -> None:
    """Numbers without a rule beside each token's value, or times it."""
    generator = torch.Generator().manual_seed(seed)
    own, numbers = torch.randn(200, generator=generator), 0.5 + torch.rand(200, generator=generator)
    assert Endings._independent(own, own + numbers) and not Endings._independent(own, own * numbers)


@pytest.mark.parametrize("added", [1e-3, -1e-3, 0.1, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ties", [True, False])
def test_a_constant_in_one_micro_batch_is_a_finding(added: float, ranks: int, ties: bool) -> None:
    """It is added to the padding too, which then received as much as the responses."""
    for seed in range(3):
        settings = {"ties": ties, "token_advantages": False, "ranks": ranks}
        for size in ({"responses": 4, "tokens": 6}, {"responses": 8, "tokens": 12}):
            given = rollout(seed, **settings, **size)
            first, *others = train(given, lambda micro, given=given: ppo(micro, tokens_of(given, micro)))
            first = replace(first, gradient_bT=first.gradient_bT + added)
            assert not check(given.batch, TOKEN_MEAN, [first, *others]).ok


def test_token_weights_that_did_not_arrive() -> None:
    """The response's mean advantage for each of its tokens."""
    given = rollout(39)
    mask = given.batch.mask_BT
    mean = (given.batch.advantages_BT * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    receipt = receipt_of(given, lambda m: ppo(m, tokens_of(given, m), advantages=mean[m.rows].expand(-1, 12)))
    assert names(receipt.findings) == ["flattened"]


def test_prompts_that_train() -> None:
    given = rollout(40)
    pieces = train(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    pieces[0] = replace(pieces[0], outside_b=torch.full((len(pieces[0].rows_b),), 0.1))
    assert names(check(given.batch, TOKEN_MEAN, pieces).findings) == ["outside"]


def test_bf16_is_no_mismatch() -> None:
    """In gradients, in log-probabilities, in the whole loss, or in the advantages alone."""
    seen = set()
    for seed in range(SEEDS):
        given = rollout(seed, epochs=3, token_advantages=bool(seed % 2))
        pieces = train(given, lambda m, g=given: ppo(m, tokens_of(g, m)))
        halves = [replace(piece, gradient_bT=piece.gradient_bT.bfloat16()) for piece in pieces]
        seen |= notes(check(given.batch, TOKEN_MEAN, halves))
        policy = given.policy_UBT.bfloat16()
        half = Rollout(replace(given.batch, old_log_probs_BT=policy[0].float()), policy, given.plan)
        seen |= notes(receipt_of(half, lambda m, g=given: ppo(m, tokens_of(g, m))))
        whole = Rollout(replace(given.batch, old_log_probs_BT=policy[0]), policy, given.plan)
        seen |= notes(receipt_of(whole, lambda m, g=given: ppo(m, tokens_of(g, m), advantages=m.advantages.bfloat16())))
        coarse = given.batch.advantages_BT.bfloat16().float()
        seen |= notes(receipt_of(given, lambda m, g=given, c=coarse: ppo(m, tokens_of(g, m), advantages=c[m.rows])))
    assert seen == {"rounded"}


def notes(receipt: Receipt) -> set[str]:
    """Names of its findings, none of which is a mismatch."""
    assert receipt.ok, [str(finding) for finding in receipt.findings]
    return {finding.name for finding in receipt.findings}


def test_a_ratio_on_the_bound_of_the_clip_is_no_finding() -> None:
    """Rounding alone decides whether it is clipped."""
    given = rollout(45, epochs=2)
    lower = replace(given.batch, old_log_probs_BT=given.batch.old_log_probs_BT - 0.3)  # so that none is above 0
    given = Rollout(lower, given.policy_UBT - 0.3, given.plan)
    at_the_bound = given.batch.old_log_probs_BT + torch.tensor(1.2).log()
    given.policy_UBT[1] = torch.where(torch.arange(12) % 2 == 0, at_the_bound, given.policy_UBT[1])
    for nudge in (-3e-6, 3e-6):
        moved = Rollout(given.batch, given.policy_UBT + nudge, given.plan)
        pieces = train(moved, lambda micro, moved=moved: ppo(micro, tokens_of(moved, micro)))
        shifted = [replace(piece, log_probs_bT=piece.log_probs_bT - 2 * nudge) for piece in pieces]
        assert check(given.batch, TOKEN_MEAN, shifted).findings == ()


def test_findings_survive_json_and_print() -> None:
    given = rollout(42)
    receipt = receipt_of(given, lambda micro: ppo(micro, 1), keys=[f"response {row}" for row in range(8)])
    (finding,) = receipt.findings
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding
    lines = str(finding).splitlines()
    assert len(lines) == 4 and lines[0].startswith("scaled: every token received") and "response " in lines[2]


# ---------------------------------------------------------------------------------------------------------------- measurement


def test_the_hook_reads_what_autograd_gives_and_changes_nothing() -> None:
    given = rollout(43)
    expected = train(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    leaf, plain = (given.policy_UBT[0].clone().requires_grad_() for _ in range(2))
    with watch() as watched:
        for piece in expected:
            log_probs = leaf[piece.rows_b] * 1.0
            watched.read(log_probs, piece.rows_b)
            micro = micro_of(given, piece.rows_b, log_probs)
            ppo(micro, given.batch.mask_BT.sum()).backward()
            ppo(micro_of(given, piece.rows_b, plain[piece.rows_b] * 1.0), given.batch.mask_BT.sum()).backward()
        watched.step()
    assert torch.equal(leaf.grad, plain.grad)
    for piece, other in zip(watched.pieces, expected, strict=True):
        assert torch.equal(piece.gradient_bT, other.gradient_bT) and piece.update == 0
    with torch.no_grad():
        assert Gradient(leaf * 1.0).values is None


def micro_of(given: Rollout, rows: torch.Tensor, log_probs: torch.Tensor) -> MicroBatch:
    batch = given.batch
    ones = torch.ones_like(log_probs)
    columns = (batch.old_log_probs_BT[rows], batch.advantages_BT[rows], batch.mask_BT[rows], ones, ones)
    return MicroBatch(rows, log_probs, *columns, torch.arange(8), 1)


def test_narrow_pieces_are_refused_until_they_are_padded() -> None:
    given = rollout(44)
    pieces = train(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    narrow = [replace(p, log_probs_bT=p.log_probs_bT[:, :9], gradient_bT=p.gradient_bT[:, :9]) for p in pieces]
    with pytest.raises(ValueError, match=r"use padded\(\)"):
        check(given.batch, TOKEN_MEAN, narrow)
    assert narrow[0].padded(12).gradient_bT.shape[1] == 12 and narrow[0].padded(12).width == 9
    with pytest.raises(ValueError, match="no piece was read"):
        check(given.batch, TOKEN_MEAN, [])


def test_an_update_in_which_nothing_arrives_is_lost() -> None:
    given = rollout(46, epochs=2)
    pieces = train(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    for gone, kept in ((0.0, {"lost"}), (math.nan, {"not finite"})):
        broken = [replace(p, gradient_bT=gone * p.gradient_bT if p.update == 1 else p.gradient_bT) for p in pieces]
        receipt = check(given.batch, TOKEN_MEAN, broken)
        assert {finding.name for finding in receipt.findings} == kept
        assert all(math.isfinite(finding.size) for finding in receipt.findings)
