"""Step values: a step's advantage is by how much it changes the mean reward of the siblings that pass through the same state.

A method of this project. A response is cut into steps. The state after a step is the step's place and its result: its last
number, or its text where it has none. ``V(state)`` is the mean reward of the group's responses that pass through it,
shrunk towards the group's mean; a step's tokens get ``A_t = V(after) - V(before)``. At the start ``V`` is the group's
mean, at the end the response's reward, so that the values of a response's steps sum to its ``A``.

A response's last step ends in its reward and counts in no state. A response whose advantage is not finite counts in none and
trains nothing itself.

Everything is computed from the responses' advantages, which are the rewards less the group's mean with Dr. GRPO, and the same
divided by the group's deviation with GRPO.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import regex
import torch

from grail_advantage.answers.expressions import compile_expression, find_matches
from grail_advantage.answers.text import TokenTexts, starts_of
from grail_advantage.batch import GROUPS, TOKENS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import RowSelection, Signal

State = tuple[int, str]
"""Place and result of a step."""
_NUMBER = regex.compile(r"(?:(?<![\w)\]}])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
"""A sign right after a word or a closing bracket is an operator: ``10-3`` is 10 and 3. Commas only part thousands: ``(3,4)`` is
3 and 4."""


@register_signal("step_values")
class StepValues(Signal):
    """Token advantages of either sign, from how often the group's responses through the same intermediate results were correct.

    Responses whose group has one outcome only get 0. Truncated responses count in no state's mean where they are
    masked. It needs prompts whose responses write one step a line, and several responses a prompt.
    """

    formula = "A_t = V(after) - V(before), V the mean A of the group's responses with the same result at the same step"
    source = "this project"
    reads = frozenset({GROUPS, TOKENS})
    gives = "advantages"

    separator: str = option(r"\n+", "regular expression that ends a step, in Python's syntax")

    shrink: float = option(
        1.0,
        "responses of the group's mean that are added to each state's mean; at least 0, where 0 trusts single responses",
        ge=0,
    )

    def check(self) -> None:
        super().check()
        self._compiled()

    def _compiled(self) -> regex.Pattern[str]:
        return compile_expression(self.separator, f"{self.section}.separator")

    def select(self, batch: RolloutBatch) -> RowSelection:
        """All responses that train of groups in which any advantage differs from 0."""
        rows = super().select(batch)
        _, groups_B = torch.unique(batch.groups_B, return_inverse=True)
        matters_G = torch.zeros(len(groups_B), device=groups_B.device)
        matters_G.index_add_(0, groups_B, (batch.advantages_B != 0).float())
        return RowSelection(rows.answered_B, rows.inside_gate_B, batch.trains_B & (matters_G[groups_B] > 0))

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """The token advantages, see :class:`grail_advantage.signals.base.Signal`."""
        assert batch.tokens_BT is not None and batch.groups_B is not None  # it reads them
        texts, separator = TokenTexts(batch.tokenizer), self._compiled()
        advantages, groups = batch.advantages_B.double().tolist(), batch.groups_B.tolist()
        rows = self.select(batch).selected_B.nonzero().flatten().tolist()
        tokens = {row: batch.tokens_BT[row].cpu().numpy() for row in rows}
        steps = {row: cut(texts(ids_T), texts.have_bytes(ids_T), separator) for row, ids_T in tokens.items()}
        through: dict[tuple[int, State], list[float]] = defaultdict(list)
        for row in rows:
            for state in steps[row][1][:-1]:
                through[groups[row], state].append(advantages[row])
        scores_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
        for row in rows:
            step_T, states = steps[row]
            passed = [through[groups[row], state] for state in states[:-1]]
            values = [0.0, *(sum(of) / (len(of) + self.shrink) for of in passed), advantages[row]]
            scores_BT[row] = torch.from_numpy(np.diff(values)[step_T])
        return scores_BT.to(batch.mask_BT.device)


def cut(
    texts: Sequence[str], have_bytes_T: np.ndarray, separator: regex.Pattern[str]
) -> tuple[np.ndarray, list[State]]:
    """The step of each token, int (T,), and the state after each step, of which the last is the end.

    A token belongs to the step in which its first character is, one without bytes to the step before it. A response that takes
    too long to cut is one step.
    """
    text = "".join(texts)
    ends = [match.end() for match in find_matches(separator, text) or ()]
    ends = [end for end in dict.fromkeys(ends) if 0 < end < len(text)]
    first_T: np.ndarray = np.minimum(starts_of(texts) - ~have_bytes_T, len(text) - 1)
    step_T = np.asarray(np.searchsorted(np.array(ends, dtype=np.int64), first_T, side="right"))
    steps = zip([0, *ends], [*ends, None], strict=True)
    states = [(place, result(text[first:last])) for place, (first, last) in enumerate(steps)]
    return step_T, states


def result(step: str) -> str:
    """A step's last number without separators and superfluous zeros, else its text with single spaces."""
    numbers = _NUMBER.findall(step)
    if not numbers:
        return " ".join(step.split())
    sign = "-" if numbers[-1].startswith("-") else ""
    whole, _, part = numbers[-1].lstrip("+-").replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return sign * (whole != "0" or bool(part)) + whole + (f".{part}" if part else "")


StepValuesConfig = StepValues
"""Its name before 0.2."""
