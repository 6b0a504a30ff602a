"""Settings of a run that a method works with, by its use of the model and the columns that it reads.

The start-up checks refuse by these rules, and the page of all methods shows them. Needs no verl.
"""

from __future__ import annotations

from grail_advantage.batch import ENTROPY
from grail_advantage.signals.base import HIDDEN_STATES, LOGITS, SEQUENCES, Signal

NEEDED = {LOGITS: "logits", SEQUENCES: "logits of made-up sequences", HIDDEN_STATES: "hidden states"}
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole, for messages."""


def works_with_sequence_parallel(signal: Signal) -> bool:
    """Whether each rank may hold a slice of the rows."""
    return signal.uses not in NEEDED


def works_with_fused_kernels(signal: Signal) -> bool:
    """Whether verl's fused forward is enough, whose output is log-probabilities alone."""
    return signal.uses not in NEEDED


def works_with_bypass(signal: Signal) -> bool:
    """Whether the rollout's log-probabilities may replace the old ones, so that no forward gives an entropy."""
    return ENTROPY not in signal.reads
