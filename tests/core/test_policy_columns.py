"""The methods that read old log-probabilities and entropies: against loops over random rows, and through the plain host."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grail_advantage import AnswerSpan, compute_token_weights
from grail_advantage.methods import method
from tests.core import plain_weights, reference
from tests.core.common import METHODS, few
from tests.core.plain_weights import Row, close, random_rows, weights_of
from tests.core.tiny_models import END, ROLLOUTS, Batch, Rollout, char_tokenizer, encode, make_batch, tiny_model

READS = {
    "surprisal": {"old_log_probs"},
    "entropy": {"entropy"},
    "high_entropy": {"entropy"},
    "entropy_bonus": {"entropy"},
    "probability": {"old_log_probs"},
    "stare": {"old_log_probs", "entropy"},
    "polarity": set(),
    "a3po": {"old_log_probs"},
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
    "a3po": {"rho": [2.0, 1.5], "share": [0.2, 0.35, 1.0], "decay_steps": [0, 1, 200]},
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
@few(80)
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


def columns_by_hand(model: Any, temperature: float) -> list[Row]:
    """Each row alone through a float64 copy of the model, all logits, the distribution of each predictor position."""
    model = copy.deepcopy(model).double()
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
    rows = columns_by_hand(model, temperature)
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
