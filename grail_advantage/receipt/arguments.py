"""What :func:`grail_advantage.receipt.check` refuses, by the argument's name. Shape suffixes as in :mod:`.losses`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .arrived import PRECISION
from .losses import AGGREGATIONS, FORMULAS, KL, OVER, Batch, Loss
from .measure import Piece

# Beside the floats of PRECISION: quantised, complex and 8-bit numbers have no isfinite() or no order.
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def checked(batch: Batch, loss: Loss, pieces: Iterable[Piece]) -> tuple[Batch, list[Piece]]:
    """The batch and the pieces, their tensors detached and in the host's memory; errors as :func:`.check.check`."""
    pieces = list(pieces)
    if not pieces:
        raise ValueError(
            "no piece was read (pieces is empty): call Watch.read() before each micro-batch's loss"
        )
    shape = tuple(getattr(batch.mask_BT, "shape", ()))
    if len(shape) != 2:
        raise ValueError(
            f"mask_BT must be a tensor (B, T), got {shape or type(batch.mask_BT).__name__}"
        )
    B, T = shape
    for name in ("updates", "epochs", "ranks"):
        count = getattr(batch, name)
        # A bool is an int, so that updates=True would be one step.
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}={count!r} must be a whole number of at least 1")
    if batch.keys is not None and len(batch.keys) != B:
        raise ValueError(f"keys must be a list of {B} texts, one a response")
    mask_BT = _tensor("mask_BT", batch.mask_BT, shape).bool()
    left_out_B = torch.zeros(B, dtype=torch.bool)
    if batch.left_out_B is not None:
        left_out_B = _tensor("left_out_B", batch.left_out_B, (B,)).bool()
    columns: dict[str, Any] = {}
    for name in ("advantages_BT", "old_log_probs_BT", "weights_BT", "ref_log_probs_BT"):
        values_BT = getattr(batch, name)
        if values_BT is None and name != "advantages_BT":
            continue
        columns[name] = _tensor(name, values_BT, shape)
        # What is left out on purpose is read by no loss, and may hold anything.
        values_K = columns[name][mask_BT & ~left_out_B[:, None]]
        if not values_K.isfinite().all() or (name == "weights_BT" and (values_K < 0).any()):
            raise ValueError(f"{name} holds inf, NaN or a negative weight at a token that trains")
        # Rounding puts log p above 0 by less; -log p is nowhere below.
        if "log_probs" in name and (values_K > 0.1).any() and not (values_K < 0).any():
            raise ValueError(
                f"{name} holds {float(values_K.max()):.3g}, and nothing below 0: pass log p"
            )
    for name, choices in (
        ("aggregation", AGGREGATIONS),
        ("over", OVER),
        ("kl", (None, *KL)),
        ("account", (None, *FORMULAS)),
    ):
        value = getattr(loss, name)
        if not callable(value) and value not in choices:
            raise ValueError(
                f"{name}={value!r} is unknown; choose one of {', '.join(map(str, choices))}"
            )
    steps = batch.updates * batch.epochs
    if batch.totals_U2 is not None:
        totals_U2 = _tensor("totals_U2", batch.totals_U2, (len(batch.totals_U2), 2))
        if len(totals_U2) < steps:
            raise ValueError(f"totals_U2 must be ({steps}, 2): updates x epochs steps")
    batch = replace(batch, mask_BT=mask_BT, left_out_B=left_out_B, **columns)
    return batch, [_piece(piece, B, T, steps, batch.ranks) for piece in pieces]


def _piece(piece: Piece, B: int, T: int, steps: int, ranks: int) -> Piece:
    rows_b = _tensor("rows_b", piece.rows_b, (len(piece.rows_b),)).long()
    if ((rows_b < 0) | (rows_b >= B)).any():
        raise ValueError(
            f"rows_b holds {rows_b.tolist()}; places of the rollout batch are 0 to {B - 1}"
        )
    if not (0 <= piece.update < steps and 0 <= piece.rank < ranks):
        raise ValueError(
            f"update={piece.update}, rank={piece.rank}: the batch has {steps} steps on {ranks} ranks"
        )
    # The wider of the two says how wide the micro-batch was, so that the other one is named where they differ.
    widths = [
        values.shape[1]
        for values in (piece.log_probs_bT, piece.gradient_bT)
        if getattr(values, "ndim", 0) == 2
    ]
    shape = (len(rows_b), min(max(widths, default=T), T))
    return replace(
        piece,
        rows_b=rows_b,
        log_probs_bT=_tensor("log_probs_bT", piece.log_probs_bT, shape),
        gradient_bT=_tensor("gradient_bT", piece.gradient_bT, shape),
    ).padded(T)


def _tensor(name: str, values: Any, shape: tuple[int, ...]) -> Tensor:
    plain = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_meta
    dtypes = [*PRECISION]
    # Log-probabilities and gradients are no whole numbers.
    if "log_probs" not in name and "gradient" not in name:
        dtypes += WHOLE
    if not plain or tuple(values.shape) != shape or values.dtype not in dtypes:
        got = f"{values.dtype} of shape {tuple(values.shape)}" if plain else type(values).__name__
        raise ValueError(
            f"{name} must be a dense tensor of numbers of shape {shape}, got {got}; see Piece.padded()"
        )
    if name in ("mask_BT", "left_out_B") and (values != values.bool()).any():
        raise ValueError(f"{name} must be bool or hold 0 and 1")
    return values.detach().cpu()
