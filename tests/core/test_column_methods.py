"""The methods that read old log-probabilities and entropies: by hand, against loops over random rows, and from a model."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import AnswerSpan, Signal, compute_token_weights
from grail_advantage.methods import method
from grail_advantage.signals.entropy import EntropyConfig as Entropy
from grail_advantage.signals.entropy_bonus import EntropyBonusConfig as EntropyBonus
from grail_advantage.signals.high_entropy import HighEntropyConfig as HighEntropy
from grail_advantage.signals.polarity import PolarityConfig as Polarity
from grail_advantage.signals.probability import ProbabilityConfig as Probability
from grail_advantage.signals.stare import StareConfig as Stare
from grail_advantage.signals.steer import SteerConfig as Steer
from grail_advantage.signals.surprisal import SurprisalConfig as Surprisal
from tests.core import plain_weights, reference
from tests.core.common import METHODS, few
from tests.core.plain_weights import SPAN, Row, batch_of, close, random_rows, result_of, weights_of
from tests.core.tiny_models import END, ROLLOUTS, Batch, Rollout, char_tokenizer, encode, make_batch, tiny_model

NAN, INF = math.nan, math.inf
HALF = math.log(0.5)
LOW = 0.125
"""An entropy below the threshold of `stare`."""


def low(advantage: float, *surprisals: float) -> Row:
    return Row(advantage, [-value for value in surprisals], [LOW] * len(surprisals))


def undecided(advantage: float, *entropies: float, span: AnswerSpan | None = None) -> Row:
    return Row(advantage, (), entropies, span)


LOG_PROBS = [-0.5, -2.0, -1.0, -4.0, -0.25, -0.125, -8.0]
WRONG = Row(-1.0, LOG_PROBS, [NAN] * 7, SPAN)  # entropies are not read
TWO = AnswerSpan(2, 2, 2, 2)
SIGNS = [Row(advantage, [-1.0, -2.0], span=TWO) for advantage in (-1.0, 0.0, 1.0)]
KEPT, ONES = [0, 1], [1, 1]
ABOVE_ZERO = Row(-1.0, [0.25, -0.0, 0.0], span=AnswerSpan(3, 3, 3, 3))
# Ten tokens, of which a fifth is two; the row of the highest has advantage 0, another has no token kept.
TEN = [undecided(0.0, 9, 1, 2), undecided(-1.0, 3, 8, 4, 5), undecided(1.0, 6, 7, 0)]
TIED = [undecided(1.0, 2, 1, 1), undecided(-1.0, 1, 0, 0, 0, 0, 0, 0)]
# Eleven tokens with a positive advantage, three with a negative one: a tenth is two, and one.
OF_ALL_SIGNS = [low(1.0, 1, 2, 9, 4), low(0.5, 5, 6, 8, 7), low(-1.0, 30, 10, 20), low(0.0, 99, 99), low(2.0, 3, 3, 3)]
CHOSEN = [[1, 1, 1.1, 1], [1, 1, 1.1, 1], [1, 1, 1], [1, 1], [1, 1, 1]]

BY_HAND: dict[str, tuple[Signal, list[Row], list]] = {
    "surprisal: the least likely reasoning token": (Surprisal(), [WRONG], [[0, 1, 0, 0, 0, 0, 0]]),
    "no answer": (Surprisal(), [Row(-1.0, LOG_PROBS)], [[1] * 7]),
    "nothing before the answer": (Surprisal(), [Row(-1.0, LOG_PROBS, span=AnswerSpan(0, 1, 2, 3))], [[1] * 7]),
    "mass": (Surprisal(normalize_mass=True, reshaper_options={"k": 2}), [WRONG], [[0, 3.5, 3.5, 0, 0, 0, 0]]),
    "gate wrong": (Surprisal(gate="wrong"), SIGNS, [KEPT, ONES, ONES]),
    "gate correct": (Surprisal(gate="correct"), SIGNS, [ONES, ONES, KEPT]),
    "rounded above 0: all equal, so the first": (Surprisal(), [ABOVE_ZERO], [[1, 0, 0]]),
    # Mean 2: ratios 0.5, 0, 2.5 and 1. With or without an answer, and whatever the sign; or rounded below 0.
    "entropy": (
        Entropy(),
        [undecided(-1.0, 1, 0, 5, 2), undecided(0.5, 1, 0, 5, 2, span=TWO), undecided(0.0, 1, 5), undecided(1, -0.25, 1)],
        [[0.95, 0.9, 1.15, 1], [0.95, 0.9, 1.15, 1], [1, 1], [0.9, 1.1]],
    ),
    "high_entropy": (HighEntropy(), TEN, [[5, 0, 0], [0, 5, 0, 0], [0, 0, 0]]),
    "rounded up": (HighEntropy(rho=0.21, denominator="all"), TEN, [[1, 0, 0], [0, 1, 0, 0], [0, 1, 0]]),
    # Two of ten, and two more that tie.
    "ties are kept and counted": (HighEntropy(), TIED, [[2.5] * 3, [2.5, 0, 0, 0, 0, 0, 0]]),
    "a broken row counts nowhere": (
        HighEntropy(),
        [undecided(1.0, NAN, 50, 60, 70, 80), undecided(-1.0, 4, 1, 2, 3, 0)],
        [[1] * 5, [5, 0, 0, 0, 0]],
    ),
    "entropy_bonus": (
        EntropyBonus(),
        [undecided(advantage, 0, 0.5, 1, 2, -0.25) for advantage in (1.0, -1.0, 0.5, -4.0, 0.0)],
        [[1, 1.2, 1.4, 1.5, 1], [1, 0.8, 0.6, 0.5, 1], [1, 1.4, 1.5, 1.5, 1], [1, 0.95, 0.9, 0.8, 1], [1] * 5],
    ),
    "probability": (
        Probability(),
        [Row(advantage, [0.0, HALF, 2 * HALF, -200.0, 0.25]) for advantage in (1.0, -1.0, 0.0)],
        [[1, 0.9, 0.85, 0.8, 1], [1, 0.9, 0.85, 0.8, 1], [1] * 5],
    ),
    "stare": (Stare(), OF_ALL_SIGNS, CHOSEN),
    "C2": (Stare(variant="C2"), OF_ALL_SIGNS, [*CHOSEN[:2], [0.9, 1, 1], *CHOSEN[3:]]),
    "at the threshold": (Stare(threshold=0.5), [Row(1.0, [-1.0], [0.5])], [[1.0]]),
    "stare, a broken row": (
        Stare(), [Row(1.0, [-9.0] * 20, [5.0] * 19 + [INF]), low(1.0, 1, 2)], [[1] * 20, [1, 1.1]],
    ),
    "PSR": (Polarity(wrong=0), SIGNS, [[0, 0], ONES, ONES]),
    "W-REINFORCE": (Polarity(right=0.1), SIGNS, [ONES, ONES, [0.1, 0.1]]),
    "a token's mass for each wrong row": (
        Polarity(wrong=3, spread=True, spread_over="wrong"), [*SIGNS, WRONG], [[1.5, 1.5], ONES, ONES, [3 / 7] * 7],
    ),
    # |A (1 - p) (log p + H)|: 2 * 0.5 * |H - log 2|, so 0, 2 and 1; a certain token changes nothing.
    "steer": (
        Steer(),
        [Row(-2.0, [HALF, HALF, 0.0], [-HALF, 2 - HALF, 9]), Row(2.0, [HALF], [1 - HALF]), Row(0.0, [HALF], [99])],
        [[1.2, 0.8, 1.2], [1.0], [1]],
    ),
    "steer, all equal": (Steer(), [Row(1.0, [HALF] * 2, [3] * 2)], [[1, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str) -> None:
    signal, rows, expected = BY_HAND[case]
    close(weights_of(signal, rows), expected)


def test_polarity_refuses_to_train_nothing() -> None:
    with pytest.raises(ValueError, match=r"polarity\.right=0 and polarity\.wrong=0: nothing would train"):
        Polarity(right=0, wrong=0)


def test_bounds_of_the_entropy_bonus_are_flagged() -> None:
    entropies = (0.0, 0.5, 1.0, 2.0)
    rows = [undecided(advantage, *entropies) for advantage in (1.0, -1.0, 0.0)]
    for kappa in (2.0, 3.0, 7.0):  # 1 / 3 and 1 / 7 are exact in no float
        found = result_of(EntropyBonus(kappa=kappa, alpha=0.4), batch_of(rows))
        bound = [0.4 * entropy >= 1 / kappa for entropy in entropies]
        assert found.at_upper_bound_BT.tolist() == [bound, [False] * 4, [False] * 4]
        assert found.at_lower_bound_BT.tolist() == [[False] * 4, bound, [False] * 4]


def test_stare_takes_the_mean_entropy_as_the_loss_takes_it() -> None:
    def mean_of_row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        assert mask_BT.sum() == 8 and bool(values_BT.isfinite().all())
        return float(((values_BT * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1)).mean())

    # By tokens 0.2125, by rows 0.1625.
    rows = [Row(1.0, [-1.0], [LOW]), Row(-1.0, [-1.0] * 7, [0.225] * 7)]
    for threshold, by_tokens, by_rows in ((0.15, 1.0, 1.0), (0.2, 1.0, 1.1), (0.25, 1.1, 1.1)):
        close(weights_of(Stare(threshold=threshold), rows), [[by_tokens], [1] * 7])
        found = weights_of(Stare(threshold=threshold), rows, aggregate=mean_of_row_means, extra=2)
        close(found, [[by_rows], [1] * 7])


READS = {
    "surprisal": {"old_log_probs"},
    "entropy": {"entropy"},
    "high_entropy": {"entropy"},
    "entropy_bonus": {"entropy"},
    "probability": {"old_log_probs"},
    "stare": {"old_log_probs", "entropy"},
    "polarity": set(),
    "steer": {"old_log_probs", "entropy"},
}
MAP = st.one_of(
    st.fixed_dictionaries({"reshaper": st.just("top"), "share": st.sampled_from([0.2, 0.4])}),
    st.fixed_dictionaries({"reshaper": st.just("top"), "k": st.sampled_from([1, 3])}),
    st.fixed_dictionaries({"reshaper": st.just("power"), "exponent": st.sampled_from([1.5, 2.0])}),
    st.fixed_dictionaries({"reshaper": st.just("mean_ratio"), "beta": st.sampled_from([0.1, 2.0])}),
)
ROWS_OPTIONS = {"gate": ["wrong", "correct", "all"], "statistics": ["reasoning", "response"]}
OPTIONS: dict[str, dict[str, list]] = {
    "surprisal": ROWS_OPTIONS,
    "entropy": ROWS_OPTIONS,
    "high_entropy": {"rho": [0.2, 0.05, 0.5, 1.0], "denominator": ["selected", "all"]},
    "entropy_bonus": {"alpha": [0.4, 0.1, 3.0], "kappa": [2.0, 1.25, 10.0]},
    "probability": {"alpha": [0.2, 0.3, 1.0]},
    "stare": {  # the mean entropy is about 1
        "variant": ["O1", "C2"],
        "threshold": [0.3, 1.0, 10.0],
        "share": [0.1, 0.35, 1.0],
        "strength": [0.1, 0.05, 1.0],
    },
    "polarity": {
        "right": [1.0, 0.1, 3.0],
        "wrong": [1.0, 0.0, 0.5],
        "spread": [False, True],
        "spread_over": ["both", "right", "wrong"],
    },
    "steer": {"highest": [1.2, 2.0], "lowest": [0.8, 0.0]},
}
COMPARES_ROWS = {"high_entropy", "stare", "steer"}
KEEPS_MASS_AS_IT_IS = {"polarity"}
OTHERS = {"uniform", "pattern", "step_values"}
"""Methods that read neither; those that read tokens are in ``test_text_methods.py``."""


def test_each_has_a_plain_computation() -> None:
    known = {name: method(name).build({}) for name in METHODS}
    reads = {name: set(signal.reads) for name, signal in known.items() if not signal.uses and name not in OTHERS}
    assert reads == READS
    assert set(READS) == set(plain_weights.METHODS)


@pytest.mark.parametrize("name", READS)
@few(40)
@given(data=st.data(), seed=st.integers(0, 10_000), extra=st.integers(0, 2), normalize_mass=st.booleans())
def test_against_loops(name: str, data: st.DataObject, seed: int, extra: int, normalize_mass: bool) -> None:
    """Rows of 0 to 14 tokens with and without answers, some with gaps, every other draw full of ties."""
    rows = random_rows(seed)
    options = data.draw(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in OPTIONS[name].items()}))
    if name not in KEEPS_MASS_AS_IT_IS:
        options["normalize_mass"] = normalize_mass
    of_map = data.draw(MAP) if OPTIONS[name] is ROWS_OPTIONS else {}
    config = dict(options)
    if of_map:
        config |= {"reshaper": of_map["reshaper"]}
        config["reshaper_options"] = {key: value for key, value in of_map.items() if key != "reshaper"}
    signal = method(name).build(config)
    got = weights_of(signal, rows, extra=extra)
    close(got, plain_weights.METHODS[name](rows, **options, **of_map))
    if name not in COMPARES_ROWS:
        assert got == [weights_of(signal, [row])[0] for row in rows], "a row weighs the same alone"


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in READS),  # stare is off: the tiny model's entropy is far above 0.3
    ("surprisal", {"reshaper": "power", "gate": "all", "statistics": "response", "normalize_mass": True}),
    ("entropy", {"reshaper": "top", "gate": "correct", "statistics": "reasoning"}),
    ("stare", {"threshold": 100.0, "variant": "C2"}),
]
ROWS = [*ROLLOUTS.values(), Rollout("And?", r"So \boxed{1}", 0.0), Rollout("One token?", "7", 1.0)]


@cache
def columns_by_hand(temperature: float) -> list[Row]:
    """Each row alone through a float64 copy of the model, all logits, the distribution of each predictor position."""
    model = tiny_model("qwen3").double()
    found = []
    for rollout in ROWS:
        prompt, response = encode(rollout.prompt), encode(rollout.response)
        with torch.no_grad():
            logits_SV = model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
        log_probs, entropies = [], []
        for place, token in enumerate(response):
            exponentials = [math.exp(value) for value in logits_SV[len(prompt) + place - 1].tolist()]
            total = math.fsum(exponentials)
            log_probs.append(math.log(exponentials[token] / total))
            entropies.append(-math.fsum(value / total * math.log(value / total) for value in exponentials))
        spans = reference.boxed_spans(rollout.response.removesuffix(END))
        found.append(Row(rollout.advantage, log_probs, entropies, AnswerSpan(*spans[-1]) if spans else None))
    return found


def full_width(batch: Batch, rows: list[Row], name: str) -> torch.Tensor:
    """A column (B, L), NaN outside the responses."""
    column_BL = torch.full(batch.input_ids.shape, math.nan)
    for index, row in enumerate(rows):
        column_BL[index, batch.response_mask[index].bool()] = torch.tensor(getattr(row, name), dtype=torch.float32)
    return column_BL


def of_responses(values_BL: torch.Tensor, batch: Batch) -> list[list[float]]:
    return [values_BL[index, batch.response_mask[index].bool()].tolist() for index in range(len(values_BL))]


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_columns_come_from_the_model_where_they_are_not_given(name: str, options: dict) -> None:
    model, temperature = tiny_model("qwen3"), 0.7
    rows = columns_by_hand(temperature)
    batch = make_batch(ROWS, "both", extra=2)
    config = method(name).build(options)
    expected = plain_weights.METHODS[name](rows, **options)
    result = compute_token_weights(model, char_tokenizer(), *batch.tensors(), config, temperature=temperature)
    close(of_responses(result.weights, batch), expected, 2e-4)
    assert bool((result.weights[~batch.response_mask.bool()] == 0).all())
    assert result.spans == [row.span for row in rows]
    # One of the two given, the other computed.
    given = {"old_log_probs": full_width(batch, rows, "log_probs")}
    again = compute_token_weights(model, char_tokenizer(), *batch.tensors(), config, temperature=temperature, **given)
    close(of_responses(again.weights, batch), expected, 2e-4)
