"""The receipt by itself: the watch, losses given as functions, precision, the adapters, and the wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from grail_advantage.receipt import Batch, Loss, Piece, Tokens, Watch, check, trl_loss, verl_loss, watch
from grail_advantage.receipt.adapters import loop, skyrl
from grail_advantage.receipt.adapters.hugging_face import ReceiptCallback
from grail_advantage.receipt.report import read
from tests.core.receipt_faults import TOKEN_MEAN, ppo, tokens_of
from tests.core.receipt_loop import Rollout, names, rollout, train

ROOT = Path(__file__).parents[2]


def test_no_hook_is_left() -> None:
    """After the context, also after an error in it; a gradient is divided by its scale, and has its rank."""
    leaf = torch.zeros(2, 3, requires_grad=True)
    watched = Watch()
    with pytest.raises(KeyError), watched:
        first = leaf * 1.0
        watched.read(first, [0, 1], rank=1, scale=4.0)
        first.sum().backward(retain_graph=True)
        raise KeyError
    first.sum().backward()
    (piece,) = watched.pieces
    assert piece.rank == 1 and torch.equal(piece.gradient_bT, torch.full((2, 3), 0.25))
    assert [torch.equal(each.gradient_bT, piece.gradient_bT) for each in watched.gather()] == [True]
    with pytest.raises(ValueError, match="one row of them for each response"), watch() as other:
        other.read(leaf[0], [0, 1])


# ------------------------------------------------------------------------------------------------ losses given as functions


def clipped(tokens: Tokens) -> torch.Tensor:
    """PPO's, with a dual clip at 1.6."""
    ratio = (tokens.log_probs - tokens.old).exp()
    objective = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.3) * tokens.advantages)
    capped = torch.maximum(objective, 1.6 * tokens.advantages)
    return -torch.where(tokens.advantages < 0, capped, objective) * tokens.weights


def clamped(tokens: Tokens) -> torch.Tensor:
    """CISPO's, with a KL term by k3."""
    ratio = (tokens.log_probs - tokens.old).exp().clamp(0.8, 1.3).detach()
    gap = tokens.ref - tokens.log_probs
    return -ratio * tokens.advantages * tokens.log_probs * tokens.weights + 0.1 * (gap.exp() - gap - 1)


def gated(tokens: Tokens) -> torch.Tensor:
    """SAPO's."""
    tau = torch.where(tokens.advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(tau * ((tokens.log_probs - tokens.old).exp() - 1)) * 4 / tau
    return -gate * tokens.advantages * tokens.weights


def of_the_response(tokens: Tokens) -> torch.Tensor:
    """GSPO's, token by token."""
    moved = torch.where(tokens.mask, tokens.log_probs - tokens.old, 0.0)
    mean = moved.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True)
    ratio = (mean.detach() + tokens.log_probs - tokens.log_probs.detach()).exp()
    bounded = ratio.clamp(0.8, 1.3)
    return -torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages) * tokens.weights


CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
PAIRS = {
    "vanilla": (clipped, verl_loss("vanilla", "token-mean", clip_ratio_c=1.6, **CLIP)),
    "cispo": (clamped, verl_loss("cispo", "token-mean", kl="k3", kl_coef=0.1, **CLIP)),
    "sapo": (gated, replace(trl_loss("sapo"), aggregation="token-mean", over="update")),
    "gspo": (of_the_response, verl_loss("gspo", "token-mean", **CLIP)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_as_a_function_is_the_second_opinion_of_the_formula(name: str) -> None:
    function, formula = PAIRS[name]
    for seed in range(4):
        given = rollout(seed, epochs=3, weights=True, token_advantages=bool(seed % 2))

        def value(m: Any, given: Rollout = given) -> torch.Tensor:
            tokens = Tokens(m.advantages, m.weights, m.mask, m.log_probs, m.old, m.ref)
            return (function(tokens) * m.mask).sum() / tokens_of(given, m)

        pieces = train(given, value)
        by_formula = check(given.batch, formula, pieces)
        by_function = check(given.batch, Loss(name, function), pieces)
        assert by_formula.findings == by_function.findings == ()
        torch.testing.assert_close(by_formula.expected_UBT, by_function.expected_UBT, equal_nan=True)
        halved = [replace(piece, gradient_bT=piece.gradient_bT / 2) for piece in pieces]
        assert names(check(given.batch, Loss(name, function), halved).findings) == ["scaled"]


# ------------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_factor_that_is_seen(dtype: torch.dtype) -> None:
    """As the receipt says, with advantages of 1."""
    given = rollout(7, token_advantages=False, ties=True)
    pieces = train(given, lambda micro: ppo(micro, tokens_of(given, micro)))
    clean = check(given.batch, TOKEN_MEAN, [replace(p, gradient_bT=p.gradient_bT.to(dtype)) for p in pieces])
    assert clean.ok and 1.0001 < clean.seen_from < 1.07
    for share, expected in ((0.8, []), (1.3, ["scaled"])):
        factor = 1 + share * (clean.seen_from - 1)
        scaled = [replace(p, gradient_bT=(p.gradient_bT.double() * factor).to(torch.float64)) for p in pieces]
        exact = [
            replace(p, log_probs_bT=p.log_probs_bT.to(dtype)) for p in scaled
        ]  # the type of either tells the precision
        batch = replace(given.batch, old_log_probs_BT=given.policy_UBT[0].to(dtype).float())
        assert names(check(batch, TOKEN_MEAN, exact).findings) == expected


def test_a_kl_term_without_advantages_is_no_alarm() -> None:
    """The policy is next to its reference, so that the slope is all cancellation."""
    for seed in range(5):
        given = rollout(seed, epochs=2)
        batch = replace(given.batch, advantages_BT=torch.zeros_like(given.batch.advantages_BT))
        batch = replace(batch, ref_log_probs_BT=batch.old_log_probs_BT * (1 + 1e-6))
        given = Rollout(batch, batch.old_log_probs_BT.expand(2, -1, -1), given.plan)

        def value(m: Any, given: Rollout = given) -> torch.Tensor:
            gap = m.ref - m.log_probs
            return 0.1 * ((gap.exp() - gap - 1) * m.mask).sum() / tokens_of(given, m)

        declared = replace(TOKEN_MEAN, kl="k3", kl_coef=0.1)
        assert check(batch, declared, train(given, value)).findings == ()


# ------------------------------------------------------------------------------------------------------------------- adapters


def own_loss(given: Rollout, log_probs_bT: torch.Tensor, rows_b: torch.Tensor) -> torch.Tensor:
    batch = given.batch
    columns = (batch.old_log_probs_BT, batch.advantages_BT, batch.mask_BT)
    old, advantages, mask = (column[rows_b] for column in columns)
    ratio = (log_probs_bT - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(objective * mask).sum() / batch.mask_BT.sum()


def test_a_loop_of_ones_own() -> None:
    given = rollout(3)
    for factor, expected in ((1.0, []), (0.5, ["scaled"])):
        table_BT = given.policy_UBT[0].clone().requires_grad_()
        optimizer = torch.optim.SGD([table_BT], lr=1.0)
        receipt = loop.train_step(
            lambda rows, table=table_BT: table[rows] * 1.0,
            lambda log_probs, rows, factor=factor: factor * own_loss(given, log_probs, rows),
            optimizer,
            given.batch,
            TOKEN_MEAN,
            torch.arange(8).split(3),
        )
        assert names(receipt.findings) == expected
        assert not torch.equal(table_BT, given.policy_UBT[0])


class Table(torch.nn.Module):
    """Log-probabilities as parameters."""

    def __init__(self, values_BT: torch.Tensor) -> None:
        super().__init__()
        self.values_BT = torch.nn.Parameter(values_BT.clone())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.values_BT[rows] * 1.0


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_hugging_face_trainer(tmp_path: Path, factor: float) -> None:
    """Two rollout batches of two epochs; ``Trainer`` divides the loss by the accumulation steps, which the loss has to undo."""
    given = rollout(4, epochs=2)
    receipt = ReceiptCallback(TOKEN_MEAN, tmp_path / "receipts.jsonl")

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
            log_probs_bT = model(inputs["rows"])
            receipt.read(log_probs_bT, inputs["rows"], self.accelerator)
            return own_loss(given, log_probs_bT, inputs["rows"]) * factor * self.args.gradient_accumulation_steps

    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=4,
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
    )
    rows = [{"rows": row} for row in range(8)]
    trainer = Own(Table(given.policy_UBT[0]), arguments, train_dataset=rows, callbacks=[receipt])
    receipt.begin(given.batch)
    trainer.train()
    (first,) = receipt.receipts
    assert names(first.findings) == ([] if factor == 1 else ["scaled"])
    problems: list[str] = []
    (record,) = read(tmp_path / "receipts.jsonl", problems)
    assert not problems and (record["step"], record["updates"]) == (2, 2)


def test_skyrl() -> None:
    """Its own loss function's gradients, recorded."""
    recorded = json.loads((ROOT / "tests" / "core" / "skyrl_recorded.json").read_text(encoding="utf-8"))
    advantages, old, log_probs = (torch.tensor(recorded[name]) for name in ("advantages", "old_log_probs", "log_probs"))
    batch = Batch(advantages, torch.tensor(recorded["mask"]).bool(), old, ranks=2, on_policy=False)
    for case in recorded["cases"]:
        gradient = torch.tensor(case["gradient"])
        loss = skyrl.loss_of(SimpleNamespace(**case))
        assert loss.account == "clip"
        for factor, expected in ((1.0, []), (2.0, ["scaled"])):
            with watch() as watched:
                for rank, rows in enumerate(torch.arange(8).chunk(2)):
                    parts = iter([gradient[micro] * factor for micro in rows.split(2)])

                    def loss_fn(given: torch.Tensor, *_: Any, parts: Any = parts) -> Any:
                        return (given * next(parts)).sum(), {}

                    worker = SimpleNamespace(policy_loss_fn=loss_fn, mesh_rank=SimpleNamespace(dp=rank))
                    with skyrl.reading(worker, watched, rows.tolist()):
                        for micro in rows.split(2):
                            leaf = log_probs[micro].clone().requires_grad_()
                            worker.policy_loss_fn(leaf * 1.0, old[micro], advantages[micro])[0].backward()
                    assert worker.policy_loss_fn is loss_fn
            receipt = check(batch, loss, watched.pieces)
            assert names(receipt.findings) == expected, case["loss_reduction"]
            assert receipt.clipped_BT.sum() > 0
    assert skyrl.loss_of(SimpleNamespace(**{**case, "policy_loss_type": "sapo"})).account is None


@pytest.mark.nightly
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    """Built from the folder, and run where nothing of the package can be imported."""
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path))
    subprocess.run([*build, str(ROOT / "packages" / "token-receipt")], check=True)
    (wheel,) = tmp_path.glob("token_receipt-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    script = """
import sys, torch
before = set(sys.modules)
from token_receipt import Batch, Loss, check, watch
from token_receipt.report import main, write
table = torch.full((3, 4), -1.0, requires_grad=True)
advantages, mask = torch.tensor([[1.0], [-1.0], [2.0]]).expand(3, 4), torch.ones(3, 4, dtype=torch.bool)
with watch() as watched:
    log_probs = table * 1.0
    watched.read(log_probs, [0, 1, 2])
    (-(log_probs - log_probs.detach()).exp() * advantages).sum().div(24).backward()
loss = Loss("own", "reinforce")
write("receipts.jsonl", check(Batch(advantages, mask), loss, watched.pieces), loss.name, 1)
assert main(["receipts.jsonl"]) == 1
print({name.partition(".")[0] for name in set(sys.modules) - before} & {"grail_advantage", "numpy", "pyarrow", "transformers"})
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "MISMATCH: scaled. every token received 0.5 times" in done.stdout and done.stdout.endswith("set()\n")
    command = [sys.executable, "-m", "token_receipt", "receipts.jsonl", "--fail-on", "nothing"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 0


def test_a_piece_without_a_backward_received_nothing() -> None:
    with watch() as watched:
        watched.read(torch.zeros(2, 3, requires_grad=True) * 1.0, [0, 1])
    (piece,) = watched.pieces
    assert isinstance(piece, Piece) and not piece.gradient_bT.any()
