"""Methods that read what a response says, and neither the model nor the error: ``pattern``, a control, and
``step_values``."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import regex
import torch
from torch import Tensor

from grail_advantage.answers.expressions import CONTENT, compile_expression, find_matches
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.answers.text import TokenTexts, edges_of
from grail_advantage.data import Rollouts
from grail_advantage.maps import Weights
from grail_advantage.method import AdvantageMethod, Gate, Method, option, register

NUMBERS_AFTER_EQUALS = r"=\s*(?P<content>[-+]?\$?\d+(?:,\d{3})*(?:\.\d+)?)"


@register("pattern")
class Pattern(Method):
    """By default only the numbers after an equals sign of correct responses train. The expression is matched in the
    decoded response, and a token matches where it has a byte of the match. A response on which the expression takes more
    than a second has weight 1. Put it beside ``control=shuffled``."""

    formula = "inside (1) on the tokens that match, outside (0) on the others; elsewhere (0) in responses outside the gate"
    source = "control"
    reads = frozenset({"tokens", "tokenizer"})

    expression: str = option(
        NUMBERS_AFTER_EQUALS,
        "regular expression of Python; with a group (?P<content>...) its text counts, else the match's",
    )
    inside: float = option(1.0, "weight of the tokens that match", ge=0)
    outside: float = option(0.0, "weight of the others", ge=0)
    gate: Gate = option("correct", "responses that get weights")
    elsewhere: Literal[0, 1] = option(0, "weight outside the gate")

    def check(self) -> None:
        self._compiled()

    def _compiled(self) -> regex.Pattern[str]:
        return compile_expression(self.expression, f"{self.section}.expression")

    def select(self, r: Rollouts) -> Tensor:
        """The responses outside the gate too, which get a weight of their own."""
        return (r.advantages != 0) & r.valid

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        texts = TokenTexts(r.tokenizer)
        expression = self._compiled()
        scores = torch.zeros_like(r.mask, dtype=torch.float32)
        of_gate = self.select(r) & self.inside_gate(r)
        for index in of_gate.nonzero().flatten().tolist():
            tokens = r.tokens[index].numpy()
            inside = matched(texts(tokens), texts.have_bytes(tokens), expression)
            # Not finite where matching takes too long, so that the response has weight 1.
            scores[index] = torch.nan if inside is None else torch.from_numpy(inside)
        return scores

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        of_gate = torch.where(scores > 0, torch.full_like(scores, self.inside), self.outside)
        return Weights(torch.where(self.inside_gate(r)[:, None], of_gate, float(self.elsewhere)))


def matched(
    texts: Sequence[str], have_bytes: np.ndarray, expression: regex.Pattern[str]
) -> np.ndarray | None:
    """bool (T,): the tokens that match; ``None`` where that takes too long. A character in several tokens belongs to
    the last of them; a token without text, of bool (T,) ``have_bytes``, has the first bytes of the next character, and
    is inside where that is."""
    text = "".join(texts)
    matches = find_matches(expression, text)
    if matches is None:
        return None
    # Of each character, and one place more: a token without text at the end looks at what would come next.
    inside: np.ndarray = np.zeros(len(text) + 1, dtype=bool)
    group = CONTENT if CONTENT in expression.groupindex else 0
    for match in matches:
        # A group that took no part is at (-1, -1), which is nothing.
        inside[slice(*match.span(group))] = True
    edges = edges_of(texts)
    # Of "a=12" with 12 inside they are 0 0 0 1 2 2, and rise within the tokens that match.
    counts = np.cumsum([False, *inside])
    return have_bytes & (counts[np.maximum(edges[1:], edges[:-1] + 1)] > counts[edges[:-1]])


State = tuple[int, str]
"""Place and result of a step."""
_NUMBER = regex.compile(r"(?:(?<![\w)\]}])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
"""A sign right after a word or a closing bracket is an operator: ``10-3`` is 10 and 3. Commas only part thousands:
``(3,4)`` is 3 and 4."""


@register("step_values")
class StepValues(AdvantageMethod):
    """A response is cut into steps. The state after a step is its place and result: its last number, else its text.
    ``V(state)`` is the mean advantage of the group's responses that pass through it, shrunk towards the group's mean, 0
    at the start and the response's A at the end: its steps sum to A. A last step counts in no state. Responses whose
    group has one outcome only get 0, and masked ones count in no mean. It needs several responses a prompt, one step a
    line."""

    formula = "A_t = V(after) - V(before), V the mean A of the group's responses with the same result at the same step"
    source = "this project"
    reads = frozenset({"groups", "tokens", "tokenizer"})

    separator: str = option(r"\n+", "regular expression of Python that ends a step")
    shrink: float = option(
        1.0, "responses of the group's mean that are added to each state's; 0: none", ge=0
    )

    def check(self) -> None:
        compile_expression(self.separator, f"{self.section}.separator")

    def select(self, r: Rollouts) -> Tensor:
        """All responses that train of groups in which any advantage differs from 0."""
        assert r.groups is not None  # it reads them
        matters = torch.isin(r.groups, r.groups[r.advantages != 0])
        return r.trains & matters

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        assert r.groups is not None
        advantages = r.advantages.double().tolist()
        groups = r.groups.tolist()
        steps = steps_of(r, self.select(r), self.separator)
        through: dict[tuple[int, State], list[float]] = defaultdict(list)
        for index, (_, states) in steps.items():
            for state in states[:-1]:
                through[groups[index], state].append(advantages[index])
        scores = torch.zeros_like(r.mask, dtype=torch.float64)
        for index, (of_tokens, states) in steps.items():
            values = [0.0]
            for state in states[:-1]:
                passing = through[groups[index], state]
                values.append(sum(passing) / (len(passing) + self.shrink))
            values.append(advantages[index])
            scores[index] = torch.from_numpy(np.diff(values)[of_tokens])
        return scores


def steps_of(
    r: Rollouts, selected: Tensor, separator: str
) -> dict[int, tuple[np.ndarray, list[State]]]:
    """:func:`cut` of each response that is selected, bool (B,), by its index."""
    texts = TokenTexts(r.tokenizer)
    compiled = compile_expression(separator, "separator")
    steps = {}
    for index in selected.nonzero().flatten().tolist():
        ids = r.tokens[index].numpy()
        steps[index] = cut(texts(ids), texts.have_bytes(ids), compiled)
    return steps


def cut(
    texts: Sequence[str], have_bytes: np.ndarray, separator: regex.Pattern[str]
) -> tuple[np.ndarray, list[State]]:
    """The step of each token, int (T,), and the state after each step, of which the last is the end. A token belongs to
    the step in which its first character is, one without bytes to the step before it. A response that takes too long to
    cut is one step."""
    text = "".join(texts)
    ends = {match.end() for match in find_matches(separator, text) or ()}
    # A separator at either end makes no empty step.
    inner_ends = sorted(ends - {0, len(text)})
    # A token without bytes is looked up one character earlier, in the step before it.
    first: np.ndarray = np.minimum(edges_of(texts)[:-1] - ~have_bytes, len(text) - 1)
    pieces = pairwise([0, *inner_ends, len(text)])
    states = [(place, result(text[start:end])) for place, (start, end) in enumerate(pieces)]
    return np.asarray(np.searchsorted(inner_ends, first, side="right")), states


def starts_of_steps(step_T: np.ndarray, answer: AnswerSpan | None) -> list[int]:
    """The first token of each step, of which :func:`cut` gives each token's; the answer and all after it are one."""
    starts = [0, *(1 + np.flatnonzero(np.diff(step_T))).tolist()]
    if answer is None:
        return starts
    # Steps from 0, 6 and 11 with an answer from 9 on begin at 0, 6 and 9.
    return [start for start in starts if start < answer.start] + [answer.start]


def result(step: str) -> str:
    """A step's last number without separators and superfluous zeros, else its text with single spaces."""
    numbers = _NUMBER.findall(step)
    if not numbers:
        return " ".join(step.split())
    integer, _, decimals = numbers[-1].lstrip("+-").replace(",", "").partition(".")
    # "12.50" is 12.5, "012." is 12, and ".0" is 0.
    number = f"{integer.lstrip('0') or '0'}.{decimals}".rstrip("0").rstrip(".")
    # -0 is 0.
    return f"-{number}" if numbers[-1].startswith("-") and number != "0" else number
