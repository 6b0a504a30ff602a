"""The contract of every registered method of this package, whatever its formula.

A response that cannot be scored has weight 1 and no other response notices, the batch's figures are finite, and no
number makes a weight that is not finite or below 0. A new method is tested here as soon as it is registered.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from grail_advantage.batch import ENTROPY, EXAMPLES, GROUPS, OLD_LOG_PROBS, Example, RolloutBatch
from grail_advantage.weighting import BatchWeights, apply_token_weights, batch_weights, scores_of

from grail_advantage import AnswerSpan, Signal, compute_token_weights
from grail_advantage.methods import method
from grail_advantage.metrics import weight_metrics
from tests.core import plain_weights, reference
from tests.core.common import METHODS
from tests.core.plain_weights import Row
from tests.core.tiny_models import CHARACTERS, Batch, Rollout, char_tokenizer, encode, make_batch, tiny_model

NAN, INF = math.nan, math.inf
NOT_FINITE = (NAN, INF, -INF)
PASS = "pass"
TOKENS = 9
SPAN = AnswerSpan(4, 5, 7, 8)
ADVANTAGES = (-1.0, 0.5, -0.25, 0.5, -1.5, 0.0)
OPTIONS = {"stare": {"variant": "C2"}, "polarity": {"wrong": 0.5}, "pattern": {"gate": "wrong", "elsewhere": 1}}
"""So that the method does something with every response below, whose entropies are low."""
COMPARES_ROWS = {"high_entropy", "stare"}
"""Methods that need values of responses whose advantage is 0."""
COMPARES_TRAINED_ROWS = {"steer"}
"""Methods that compare the responses with an advantage."""
READS_NO_NUMBERS = {"uniform": 1.0, "polarity": 0.5, "pattern": 0.0}
"""Methods without a score that could break, and what they make of an incorrect response without an equals sign."""
SAID = "4=12 so 7= 3 or "
HARD = {"surprisal", "entropy_bonus", "steer", "pattern"}
"""Methods that choose a token among equal ones, or whose scores are multiplied with something else of the response."""

WEIGH = [name for name in METHODS if method(name).signal_class.gives == "weights"]
"""The others are in ``test_text_methods.py``."""
pytestmark = pytest.mark.parametrize("name", WEIGH)


@dataclass
class Case:
    """A batch with the numbers that a method reads, as the hosts fill them in."""

    advantages_B: torch.Tensor
    mask_BT: torch.Tensor
    values: dict[str, torch.Tensor]
    """By source: a column's name, or ``PASS``."""
    spans: list[AnswerSpan | None] = field(default_factory=list)

    def run(self, name: str) -> tuple[BatchWeights, dict[str, float]]:
        """Weights and figures; what every batch must fulfil is checked."""
        signal = signal_of(name)
        columns = {source: values for source, values in self.values.items() if source in signal.reads}
        text = (SAID * (self.mask_BT.shape[1] // len(SAID) + 1))[: self.mask_BT.shape[1]]
        batch = RolloutBatch(
            self.mask_BT,
            self.advantages_B,
            self.spans,
            columns,
            tokens_BT=torch.tensor(encode(text), dtype=torch.int64).expand(self.mask_BT.shape),
            tokenizer=char_tokenizer(),
        )
        rows = signal.select(batch)
        scores_BT = scores_of(signal, batch, rows, self.values[PASS] if signal.uses else None)
        result = batch_weights(scores_BT, batch, rows, signal)
        assert result.weights_BT.dtype == torch.float32 and result.weights_BT.shape == self.mask_BT.shape
        assert bool(result.weights_BT.isfinite().all()) and bool((result.weights_BT >= 0).all())
        assert bool((result.weights_BT[~self.mask_BT] == 0).all())
        figures = weight_metrics(result, self.mask_BT, self.advantages_B, rows, torch.zeros(0))
        assert all(math.isfinite(value) for value in figures.values()), figures
        return result, figures

    def with_value(self, source: str, row: int, token: int, value: float) -> Case:
        values = self.values | {source: self.values[source].clone()}
        values[source][row, token] = value
        return replace(self, values=values)

    def without(self, *rows: int) -> Case:
        """The same batch in which no token of these responses trains."""
        mask_BT = self.mask_BT.clone()
        mask_BT[list(rows)] = False
        return replace(self, mask_BT=mask_BT)

    def part(self, rows: list[int], tokens: int) -> Case:
        """Some responses, and their first tokens."""
        values = {source: values[rows, :tokens] for source, values in self.values.items()}
        return Case(self.advantages_B[rows], self.mask_BT[rows, :tokens], values, [self.spans[row] for row in rows])


def signal_of(name: str) -> Signal:
    return method(name).build(OPTIONS.get(name, {}))


def case(rows: int = len(ADVANTAGES), tokens: int = TOKENS, seed: int = 0) -> Case:
    """Ordinary numbers."""
    draw = torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        return torch.rand((rows, tokens), generator=draw)

    values = {OLD_LOG_PROBS: -3 * numbers() - 0.01, ENTROPY: 0.3 * numbers(), PASS: numbers() + 0.01}
    advantages_B = torch.tensor(ADVANTAGES).repeat(rows // len(ADVANTAGES) + 1)[:rows]
    return Case(advantages_B, torch.ones((rows, tokens), dtype=torch.bool), values, [SPAN] * rows)


def sources(name: str) -> list[str]:
    """What a method's scores are made of."""
    signal = signal_of(name)
    return [*sorted(signal.reads & {OLD_LOG_PROBS, ENTROPY}), *([PASS] if signal.uses else [])]


def scored_row(name: str) -> int:
    """A response that the method gives scores."""
    plain = case()
    batch = RolloutBatch(plain.mask_BT, plain.advantages_B, plain.spans, {})
    return int(signal_of(name).select(batch).selected_B.int().argmax())


def test_says_what_it_is_and_keeps_nothing(name: str) -> None:
    known, signal = method(name), method(name).build({})
    assert signal.name == name and type(signal).__doc__
    assert signal.formula and signal.source and signal.cost
    assert pickle.loads(pickle.dumps(signal)) == signal, "it travels to another process"
    with pytest.raises(ValueError, match="frozen"):
        signal.mask_truncated = False
    assert known.build({"mask_truncated": False}).mask_truncated is False
    assert known.build({"mask_truncated": None}).mask_truncated is True
    with pytest.raises(ValueError, match=rf"{known.section}\.nonsense is not an option; the options are .*mask_tr"):
        known.build({"nonsense": 1})


def test_a_row_with_a_number_that_is_not_finite_weighs_one_and_no_other_notices(name: str) -> None:
    bad, plain = scored_row(name), case()
    others = [row for row in range(len(ADVANTAGES)) if row != bad]
    # As if no token of it trained, which leaves it out of whatever a method compares.
    expected, _ = plain.without(bad).run(name)
    assert bool((expected.weights_BT[others] != 1).any()) or name == "uniform", "the method must do something"
    assert sources(name) or name in READS_NO_NUMBERS
    for source in sources(name):
        for value in NOT_FINITE:
            result, figures = plain.with_value(source, bad, 1, value).run(name)
            assert result.weights_BT[bad].tolist() == [1.0] * TOKENS
            assert result.non_finite_B.tolist() == [row == bad for row in range(len(ADVANTAGES))]
            assert figures["non_finite_rate"] == pytest.approx(1 / len(ADVANTAGES))
            assert torch.equal(result.weights_BT[others], expected.weights_BT[others])


def test_an_advantage_that_is_not_finite_counts_as_none(name: str) -> None:
    bad, plain = scored_row(name), case()
    others = [row for row in range(len(ADVANTAGES)) if row != bad]
    advantages_B = plain.advantages_B.clone()
    advantages_B[bad] = 0.0
    expected, expected_figures = replace(plain, advantages_B=advantages_B.clone()).run(name)
    for value in NOT_FINITE:
        advantages_B[bad] = value
        result, figures = replace(plain, advantages_B=advantages_B).run(name)
        assert torch.equal(result.weights_BT, expected.weights_BT)
        assert figures == expected_figures
        if name not in COMPARES_ROWS:
            assert result.weights_BT[bad].tolist() == [1.0] * TOKENS
        weighted_BT = apply_token_weights(
            advantages_B.unsqueeze(1).expand(-1, TOKENS), result.weights_BT, plain.mask_BT
        )
        assert bool(weighted_BT[others].isfinite().all())


def test_batches_without_a_token_and_empty_responses_among_others(name: str) -> None:
    """Responses that fill up a batch, or that a rejection emptied."""
    for shape in ((0, TOKENS), (3, 0), (0, 0)):
        nothing = case(*shape)
        nothing.spans = [None] * shape[0]
        assert nothing.run(name)[1] == {}
    kept = [1, 2, 4, 5]
    result, figures = case().without(0, 3).run(name)
    assert bool((result.weights_BT[[0, 3]] == 0).all())
    expected, expected_figures = case().part(kept, TOKENS).run(name)
    assert torch.equal(result.weights_BT[kept], expected.weights_BT)
    assert figures == pytest.approx(expected_figures)


EXTREMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all underflowed to 0": torch.zeros_like,
    "equal": lambda values: torch.full_like(values, 0.125),
    "subnormal": lambda values: values * 1e-44,
    "one that is not 0": lambda values: torch.where(torch.arange(values.shape[1]) == 2, values, 0.0),
    "rounded to bfloat16": lambda values: values.bfloat16().float(),
    "beyond bfloat16's precision": lambda values: (1 + 1e-3 * values).bfloat16().float(),
    "huge": lambda values: values * 3e38,
    "huge and tiny": lambda values: torch.where(torch.arange(values.shape[1]) % 2 == 0, 3e38, 1e-45).expand_as(values),
    "of both signs": lambda values: values - 0.5,
}


def test_numbers_that_under_and_overflow(name: str) -> None:
    """Every weight is finite, as :meth:`Case.run` checks; what is finite in float32 is a number and no fault."""
    plain = case()
    for extreme, change in EXTREMES.items():
        values = {source: change(values) for source, values in plain.values.items() if source != OLD_LOG_PROBS}
        values[OLD_LOG_PROBS] = -change(-plain.values[OLD_LOG_PROBS])
        result, figures = replace(plain, values=values).run(name)
        assert figures["non_finite_rate"] == 0 or "huge" in extreme, extreme
        if extreme in ("all underflowed to 0", "equal") and name not in COMPARES_ROWS | HARD:
            # Scores that say nothing: no token of a response counts more than another one because of them.
            for row, mask in zip(result.weights_BT, result.from_scores_BT, strict=True):
                assert row[mask].unique().numel() <= 1, extreme


LONG = 32_768
PLAIN: dict[str, Callable] = {
    name: plain_weights.METHODS[name] for name in ("entropy", "high_entropy", "entropy_bonus", "probability")
}
"""Those of the plain computations that take no time that grows with the square of the length."""


def test_rows_of_32768_tokens(name: str) -> None:
    """Sums over so many tokens stay exact: with a plain computation where there is one, else with the response by itself."""
    long = case(3, LONG, seed=5)  # two responses as long as the longest responses, and a short one
    long.spans = [AnswerSpan(LONG - 30, LONG - 20, LONG - 5, LONG - 1), None, SPAN]
    long.advantages_B = torch.tensor([-1.0, 0.5, -0.5])
    long.mask_BT[2, TOKENS:] = False
    result, _ = long.run(name)
    expected: list[list[float]] = []
    if name in PLAIN:
        lengths = zip(long.advantages_B.tolist(), (LONG, LONG, TOKENS), long.spans, strict=True)
        log_probs_BT, entropy_BT = long.values[OLD_LOG_PROBS], long.values[ENTROPY]
        expected = PLAIN[name](
            [
                Row(advantage, log_probs_BT[row, :length].tolist(), entropy_BT[row, :length].tolist(), span)
                for row, (advantage, length, span) in enumerate(lengths)
            ]
        )
    elif name == "grail":
        span, options = (LONG - 30, LONG - 20, LONG - 5, LONG - 1), reference.resolve("official")
        expected = [reference.row_weights(long.values[PASS][0].tolist(), span, -1.0, options)]
    for row, weights in enumerate(expected):
        got_T = result.weights_BT[row, : len(weights)]
        torch.testing.assert_close(got_T, torch.tensor(weights), rtol=1e-5, atol=1e-6, msg=f"response {row}")
    if name not in COMPARES_ROWS | COMPARES_TRAINED_ROWS:
        alone, _ = long.part([2], TOKENS).run(name)
        assert torch.equal(result.weights_BT[2, :TOKENS], alone.weights_BT[0])


# --- through a model -------------------------------------------------------------------------------------------------

WHOLE = [
    Rollout("Four?", r"Say it \boxed{4} then", -1.0),
    Rollout("Four?", r"It is \boxed{5}", 0.5),
    Rollout("Half?", r"\boxed{4} no, so \boxed{0.5} or", -0.5),
    Rollout("Half?", r"So \boxed{7}.<end>", 0.5),
]


@cache
def with_template() -> Any:
    """The tokenizer of single characters for chats."""
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


def weigh(
    name: str, model: Any, rollouts: list[Rollout] | Batch, **options: Any
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Weights of each response by the plain host, with what any method may ask for."""
    signal, batch = signal_of(name), rollouts if isinstance(rollouts, Batch) else make_batch(rollouts)
    tokenizer, count = char_tokenizer(), len(batch.input_ids)
    given: dict[str, Any] = {}
    if GROUPS in signal.reads:
        given["groups"] = torch.arange(count) // 2
    if EXAMPLES in signal.reads:
        tokenizer = with_template()
        asked = [{"role": "user", "content": "How many?"}]
        given["examples"] = [Example(asked, {"reward_model": {"ground_truth": "4"}}, {})] * count
    result = compute_token_weights(model, tokenizer, *batch.tensors(), signal, **given, **options)
    assert bool(result.weights.isfinite().all()) and result.weights.dtype == result.scores.dtype == torch.float32
    assert all(math.isfinite(value) for value in result.stats.values()), result.stats
    return [row[mask.bool()] for row, mask in zip(result.weights, batch.response_mask, strict=True)], result.stats


def test_nan_logits_in_one_row(name: str) -> None:
    """Of a prompt with two more responses, so that a method that compares the responses of a prompt has others to compare."""
    model = tiny_model(layers=2)  # untied, so that one broken embedding touches only the responses that read it
    with torch.no_grad():
        model.model.embed_tokens.weight[CHARACTERS.index("~")] = NAN
    broken = Rollout("Four?", r"~y \boxed{6} is", -0.5)
    weights, figures = weigh(name, model, [broken, *WHOLE])
    assert bool((weights[0] == READS_NO_NUMBERS.get(name, 1.0)).all())
    # Without its tokens in the batch.
    alone, _ = weigh(name, model, [replace(broken, response="", advantage=0.0), *WHOLE])
    for of_row, expected in zip(weights[1:], alone[1:], strict=True):
        torch.testing.assert_close(of_row, expected, rtol=1e-6, atol=1e-6)
    assert figures["non_finite_rate"] == (pytest.approx(1 / 5) if sources(name) else 0.0)
