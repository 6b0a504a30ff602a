"""What :func:`grail_advantage.receipt.check` refuses: arguments that do not fit together, by their names.

Shape suffixes: B responses of the rollout batch, b of a micro-batch, T response tokens, U steps over all epochs.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from .losses import ACCOUNTS, AGGREGATIONS, KL, OVER, Batch, Layout, Loss, Tokens, expect
from .measure import Piece
from .tensors import check_numbers, check_tensor

ROUNDING = 0.1
"""Most that rounding puts a log-probability above 0, in half precision too."""


def checked(batch: Any, loss: Any, pieces: Any) -> tuple[Batch, list[Piece]]:
    """The batch and the pieces, with their tensors in the host's memory.

    Raises:
        ValueError: naming the argument, or the part of it, and the fix.
    """
    for name, value, kind in (("batch", batch, Batch), ("loss", loss, Loss)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r:.80}")
    if isinstance(pieces, Mapping | str) or not isinstance(pieces, Iterable):
        raise ValueError(f"pieces must be a list of Piece, got {type(pieces).__name__}; Watch.pieces has one")
    pieces = list(pieces)
    for piece in pieces:
        if not isinstance(piece, Piece):
            raise ValueError(f"pieces must be a list of Piece, one of them is a {type(piece).__name__}")
    if not pieces:
        raise ValueError("no piece was read (pieces is empty): call Watch.read() before each micro-batch's loss")
    batch = _batch(batch)
    pieces = [_piece(batch, piece) for piece in pieces]
    _layout(batch, max(piece.update for piece in pieces) + 1)
    with_tokens = (piece for piece in pieces if batch.mask_BT[piece.rows_b].any())
    _loss(batch, loss, next(with_tokens, None))
    return batch, pieces


def _batch(batch: Batch) -> Batch:
    if not isinstance(batch.layout, Layout):
        raise ValueError(f"layout must be a Layout, got {batch.layout!r:.80}")
    mask_BT = _tensor("mask_BT", batch.mask_BT, "0 or 1")
    if mask_BT.ndim != 2:
        raise ValueError(f"mask_BT must be (B, T), got shape {tuple(mask_BT.shape)}")
    shape, found = tuple(mask_BT.shape), {"mask_BT": mask_BT.bool()}
    for name in ("advantages_BT", "old_log_probs_BT", "weights_BT", "ref_log_probs_BT"):
        values_BT = getattr(batch, name)
        if values_BT is None and name != "advantages_BT":
            continue
        found[name] = _tensor(
            name, values_BT, "numbers" if name in ("advantages_BT", "weights_BT") else "floats", shape
        )
    if batch.left_out_B is not None:
        found["left_out_B"] = _tensor("left_out_B", batch.left_out_B, "0 or 1", shape[:1]).bool()
    trained_BT = found["mask_BT"] & ~found.get("left_out_B", torch.zeros(shape[0], dtype=torch.bool)).unsqueeze(1)
    for name, values_BT in found.items():
        if name.endswith("_BT") and not values_BT[trained_BT].isfinite().all():
            row, token = (trained_BT & ~values_BT.isfinite()).nonzero()[0].tolist()
            raise ValueError(f"{name} is {values_BT[row, token]} at response {row}, token {token}, which trains")
        if "log_probs" in name:
            _log_probs(name, values_BT[trained_BT])
    if "weights_BT" in found and (found["weights_BT"][trained_BT] < 0).any():
        raise ValueError("weights_BT holds a number below 0; importance weights are at least 0")
    for name in ("updates", "epochs", "ranks"):
        _whole(name, getattr(batch, name), 1)
    if not isinstance(batch.on_policy, bool):
        raise ValueError(f"on_policy={batch.on_policy!r} must be True or False")
    keys = batch.keys
    if keys is not None and (
        isinstance(keys, str)
        or not isinstance(keys, list | tuple)
        or len(keys) != shape[0]
        or not all(isinstance(key, str) for key in keys)
    ):
        raise ValueError(f"keys must be a list of {shape[0]} texts, one a response; got {keys!r:.80}")
    return replace(batch, **found)


def _piece(batch: Batch, piece: Piece) -> Piece:
    B, T = batch.mask_BT.shape
    rows_b = _tensor("rows_b", piece.rows_b, "whole numbers")
    if rows_b.ndim != 1:
        raise ValueError(f"rows_b must be (b,), got shape {tuple(rows_b.shape)}")
    if len(rows_b) and not (int(rows_b.min()) >= 0 and int(rows_b.max()) < B):
        raise ValueError(f"rows_b holds {rows_b.tolist()!s:.80}; places of the rollout batch are 0 to {B - 1}")
    found = {"rows_b": rows_b.long()}
    for name in ("log_probs_bT", "gradient_bT"):
        found[name] = _tensor(name, getattr(piece, name), "floats")
        if tuple(found[name].shape) != (len(rows_b), T):
            raise ValueError(
                f"{name} of a piece has shape {tuple(found[name].shape)} for {len(rows_b)} x {T} of rows_b and mask_BT: one "
                "row a response, and use padded()"
            )
    if piece.outside_b is not None:
        found["outside_b"] = _tensor("outside_b", piece.outside_b, "numbers", (len(rows_b),))
    _whole("update", piece.update, 0, batch.updates * batch.epochs - 1, "updates x epochs steps")
    _whole("rank", piece.rank, 0, batch.ranks - 1, "ranks")
    if piece.width is not None:
        _whole("width", piece.width, 1)
    return replace(piece, **found)


def _layout(batch: Batch, steps: int) -> None:
    plan_B, totals_U2 = batch.layout.update_of_B, batch.layout.totals_U2
    if plan_B is not None:
        plan_B = _tensor("update_of_B", plan_B, "whole numbers")
        B = len(batch.mask_BT)
        if tuple(plan_B.shape) not in ((B,), (batch.epochs, B)):
            raise ValueError(f"update_of_B must be ({B},) or ({batch.epochs}, {B}), got shape {tuple(plan_B.shape)}")
        own = plan_B if batch.left_out_B is None else plan_B[..., batch.left_out_B]
        if own.numel() and not (int(own.min()) >= 0 and int(own.max()) < batch.updates):
            raise ValueError(f"update_of_B must hold updates of an epoch, 0 to {batch.updates - 1}")
    if totals_U2 is not None:
        totals_U2 = _tensor("totals_U2", totals_U2, "numbers")
        if totals_U2.ndim != 2 or totals_U2.shape[1] != 2 or len(totals_U2) < steps:
            raise ValueError(f"totals_U2 must be ({steps}, 2), got shape {tuple(totals_U2.shape)}")
        if not (totals_U2[:steps] >= 0).all() or not totals_U2.any():
            raise ValueError("totals_U2 must hold numbers of tokens and responses, at least 0 and not all 0")


def _loss(batch: Batch, loss: Loss, piece: Piece | None) -> None:
    """The settings; and the formula works on the tokens of a piece."""
    for name, known in (("aggregation", AGGREGATIONS), ("over", OVER)):
        if getattr(loss, name) not in known:
            raise ValueError(f"{name}={getattr(loss, name)!r} is unknown; choose one of {', '.join(known)}")
    if loss.norm is not None and not _number("norm", loss.norm) > 0:
        raise ValueError(f"norm={loss.norm!r} must be a number of tokens above 0, or None")
    _number("kl_coef", loss.kl_coef)
    if loss.kl is not None and loss.kl not in KL:
        raise ValueError(f"kl={loss.kl!r} is unknown; choose one of {', '.join(KL)}, or None")
    if not isinstance(loss.options, Mapping):
        raise ValueError(f"options must be a mapping, got {loss.options!r:.80}")
    for name, value in loss.options.items():
        if value is not None and not isinstance(value, str | bool) and not isinstance(value, numbers.Real):
            raise ValueError(f"options[{name!r}]={value!r} must be a number")
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"options[{name!r}] is NaN")
    account = loss.account
    if account is not None and not callable(account) and account not in list(ACCOUNTS):
        raise ValueError(f"account={account!r} is unknown; choose one of {', '.join(ACCOUNTS)}, a function, or None")
    if account is None or piece is None or (loss.kl and batch.ref_log_probs_BT is None):
        return  # structure alone is checked
    where = "account" if callable(account) else "options"
    rows_b = piece.rows_b
    columns = (batch.advantages_BT, batch.weights_BT, batch.old_log_probs_BT, batch.ref_log_probs_BT)
    own = [None if values_BT is None else values_BT[rows_b].double() for values_BT in columns]
    log_probs = piece.log_probs_bT.double()
    advantages, weights, old, ref = own
    weights = torch.ones_like(log_probs) if weights is None else weights
    tokens = Tokens(advantages, weights, batch.mask_BT[rows_b], log_probs, log_probs if old is None else old, ref)
    try:
        value = account(tokens) if callable(account) else expect(loss, tokens)[0]
        shape = tuple(value.shape)
    except Exception as error:
        raise ValueError(f"{where} of the loss {loss.name!r} does not work: {type(error).__name__}: {error}") from error
    if shape != tuple(log_probs.shape):
        raise ValueError(
            f"{where} of the loss {loss.name!r} gives shape {shape} for {tuple(log_probs.shape)}: give no mean or sum"
        )


def _tensor(name: str, values: Any, kinds: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A detached plain tensor of ``floats``, ``whole numbers``, ``numbers`` (either), or ``0 or 1``."""
    check_tensor(name, values)
    if shape is not None and tuple(values.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} as mask_BT, got {tuple(values.shape)}")
    check_numbers(name, values, kinds)
    return values.detach().cpu()


def _log_probs(name: str, values: torch.Tensor) -> None:
    """Refuse p and -log p, which are nowhere below 0. A single value above 0 is a fault of the training, for findings."""
    if (values > ROUNDING).any() and not (values < 0).any():
        raise ValueError(f"{name} holds {float(values.nan_to_num(0.0).max())}, and nothing below 0: pass log p")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    return float(value)


def _whole(name: str, value: Any, least: int, most: int | None = None, of: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name}={value} is more than {most}, the last of the batch's {of}")
