"""Pattern: tokens by what they say, such as the numbers that follow an equals sign.

A control of this project, which knows neither the model nor the error. Put it beside ``control=true``, which weighs as many
tokens of the same responses at random places.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import regex
import torch

from grail_advantage.answers.expressions import CONTENT, compile_expression, find_matches
from grail_advantage.answers.text import TokenTexts, starts_of
from grail_advantage.batch import TOKENS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import GateOption, NormalizeMass, Reshaped, RowSelection, Signal

NUMBERS_AFTER_EQUALS = r"=\s*(?P<content>[-+]?\$?\d+(?:,\d{3})*(?:\.\d+)?)"


@register_signal("pattern")
class Pattern(Signal):
    """One weight on the tokens that an expression matches, another on the others, in the responses of the gate; one
    weight for all other responses. By default only the numbers after an equals sign of correct responses train.

    The expression is matched in the decoded response. A token is inside where it has a byte of what matches. A token's score
    is 1 inside and 0 outside. A response on which the expression takes more than a second has weight 1.
    """

    formula = (
        "inside (1) on the tokens that match, outside (0) on the others; elsewhere (0) in responses outside the gate"
    )
    source = "control"
    reads = frozenset({TOKENS})

    expression: str = option(
        NUMBERS_AFTER_EQUALS,
        "regular expression in Python's syntax; with a group (?P<content>...) the group's text counts, else the match's",
    )

    inside: float = option(1.0, "weight of the tokens that match; at least 0", ge=0)

    outside: float = option(0.0, "weight of the others; at least 0", ge=0)

    gate: GateOption = "correct"

    elsewhere: Literal[0, 1] = option(0, "weight of the responses outside the gate: 0 or 1")

    control: bool = option(
        False,
        "whether as many tokens at random places of the response count in place of those that match; drawn by its content",
    )

    normalize_mass: NormalizeMass = False

    def check(self) -> None:
        super().check()
        self._compiled()

    def _compiled(self) -> regex.Pattern[str]:
        return compile_expression(self.expression, f"{self.section}.expression")

    def select(self, batch: RolloutBatch) -> RowSelection:
        """The responses outside the gate too, which get a weight of their own."""
        rows = super().select(batch)
        selected_B = (batch.advantages_B != 0) & batch.valid_B
        return RowSelection(rows.answered_B, rows.inside_gate_B, selected_B)

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        assert batch.tokens_BT is not None  # it reads them
        texts, expression = TokenTexts(batch.tokenizer), self._compiled()
        scores_BT = torch.zeros(batch.mask_BT.shape)
        rows = self.select(batch)
        for row in (rows.selected_B & rows.inside_gate_B).nonzero().flatten().tolist():
            tokens_T, mask_T = batch.tokens_BT[row].cpu().numpy(), batch.mask_BT[row].cpu().numpy()
            matched_T = matched(texts(tokens_T), texts.have_bytes(tokens_T), expression)
            if matched_T is None:
                scores_BT[row] = torch.nan
                continue
            inside_T = matched_T & mask_T
            if self.control:
                inside_T = at_random(int(inside_T.sum()), mask_T, tokens_T)
            scores_BT[row] = torch.from_numpy(inside_T).float()
        return scores_BT.to(batch.mask_BT.device)

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        inside_gate_B1 = self.select(batch).inside_gate_B.unsqueeze(1)
        of_gate_BT = torch.where(scores_BT > 0, self.inside, self.outside)
        return Reshaped(torch.where(inside_gate_B1, of_gate_BT, float(self.elsewhere)))


def matched(texts: Sequence[str], have_bytes_T: np.ndarray, expression: regex.Pattern[str]) -> np.ndarray | None:
    """bool (T,): the tokens that match; ``None`` where that takes too long.

    Args:
        texts: of the tokens. A character in several tokens belongs to the last of them.
        have_bytes_T: bool; one without text has the first bytes of the next character, and is inside where that is.
        expression: compiled.
    """
    text = "".join(texts)
    matches = find_matches(expression, text)
    if matches is None:
        return None
    inside: np.ndarray = np.zeros(len(text) + 1, dtype=bool)  # of each character
    group = CONTENT if CONTENT in expression.groupindex else 0
    for match in matches:
        inside[slice(*match.span(group))] = True  # of a group that took no part (-1, -1), nothing
    lengths_T = np.array([len(piece) for piece in texts], dtype=np.int64)
    starts_T = starts_of(texts)
    before = np.concatenate([[0], np.cumsum(inside)])
    return have_bytes_T & (before[starts_T + np.maximum(lengths_T, 1)] > before[starts_T])


def at_random(count: int, mask_T: np.ndarray, tokens_T: np.ndarray) -> np.ndarray:
    """bool (T,): that many tokens of the mask, the same for the same tokens."""
    seed = int.from_bytes(hashlib.sha256(tokens_T[mask_T].astype("<i8").tobytes()).digest()[:8])
    chosen_T: np.ndarray = np.zeros(len(mask_T), dtype=bool)
    chosen_T[np.random.default_rng(seed).choice(np.flatnonzero(mask_T), count, replace=False)] = True
    return chosen_T
