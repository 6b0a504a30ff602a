"""The receipt against independent computations, its names against faults of history, and its silence where nothing is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grail_advantage.receipt import Batch, Finding, Loss, Piece, check, trl_loss, verl_loss, watch
from grail_advantage.receipt.losses import ACCOUNTS, Tokens, expect, kl_slope
from tests.core.receipt_faults import CLIP, FAULTS, TOKEN_MEAN, Fault, named, ppo, receipt_of, table, tokens_of
from tests.core.receipt_loop import MicroBatch, Rollout, names, rollout, train

PAGE = Path(__file__).parents[2] / "docs" / "receipt.md"
SEEDS = 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.thread)
def test_a_fault_of_history_is_named(fault: Fault) -> None:
    for seed in range(1, SEEDS + 1):
        assert fault.name in named(fault, seed), (seed, named(fault, seed))
