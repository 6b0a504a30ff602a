"""The receipt: which gradient each token received, beside the advantage that was intended for it.

:mod:`measure <grail_advantage.receipt.measure>` reads dL / d log pi(token) off the tensor of log-probabilities,
:mod:`losses <grail_advantage.receipt.losses>` says what a loss should give, and
:mod:`check <grail_advantage.receipt.check>` makes a table of what differs. No trainer is imported. See docs/receipt.md.
"""

from .check import Finding, Receipt, check
from .losses import Batch, Loss, Tokens, trl_loss, verl_loss
from .measure import Piece, Watch, watch

__all__ = [
    "Batch",
    "Finding",
    "Loss",
    "Piece",
    "Receipt",
    "Tokens",
    "Watch",
    "check",
    "trl_loss",
    "verl_loss",
    "watch",
]
