"""What the methods that read old log-probabilities and entropies have in common: hosts, rows alone, registry, options.

The formulas are tested one by one in files of their own.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from grail_advantage import AnswerSpan, Signal, compute_token_weights
from grail_advantage.methods import methods
from grail_advantage.signals.entropy import EntropyConfig
from grail_advantage.signals.entropy_bonus import EntropyBonusConfig
from grail_advantage.signals.high_entropy import HighEntropyConfig
from grail_advantage.signals.probability import ProbabilityConfig
from grail_advantage.signals.stare import StareConfig
from grail_advantage.signals.surprisal import SurprisalConfig
from tests.core import plain_weights, reference
from tests.core.plain_weights import Row, batch_of, close, random_rows, result_of, weights_of
from tests.core.tiny_models import END, ROLLOUTS, Batch, Rollout, char_tokenizer, encode, make_batch, tiny_model

CLASSES: dict[str, type[Signal]] = {
    "surprisal": SurprisalConfig,
    "entropy": EntropyConfig,
    "high_entropy": HighEntropyConfig,
    "entropy_bonus": EntropyBonusConfig,
    "probability": ProbabilityConfig,
    "stare": StareConfig,
}
READS = {
    "surprisal": {"old_log_probs"},
    "entropy": {"entropy"},
    "high_entropy": {"entropy"},
    "entropy_bonus": {"entropy"},
    "probability": {"old_log_probs"},
    "stare": {"old_log_probs", "entropy"},
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("surprisal", {}),
    ("surprisal", {"reshaper": "power", "gate": "all", "statistics": "response", "normalize_mass": True}),
    ("entropy", {}),
    ("entropy", {"reshaper": "top", "gate": "correct", "statistics": "reasoning"}),
    ("high_entropy", {}),
    ("high_entropy", {"rho": 0.5, "denominator": "all"}),
    ("entropy_bonus", {}),
    ("entropy_bonus", {"alpha": 0.05, "normalize_mass": True}),
    ("probability", {}),
    ("stare", {}),  # off: the tiny model's entropy is far above 0.3
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
        span = AnswerSpan(*spans[-1]) if spans else None
        found.append(Row(rollout.advantage, log_probs, entropies, span))
    return found


def full_width(batch: Batch, rows: list[Row], name: str) -> torch.Tensor:
    """A column (B, L), NaN outside the responses."""
    column_BL = torch.full(batch.input_ids.shape, math.nan)
    for index, row in enumerate(rows):
        column_BL[index, batch.response_mask[index].bool()] = torch.tensor(getattr(row, name), dtype=torch.float32)
    return column_BL


def of_responses(values_BL: torch.Tensor, batch: Batch) -> list[list[float]]:
    return [values_BL[index, batch.response_mask[index].bool()].tolist() for index in range(len(values_BL))]


@pytest.mark.parametrize("padding", ["left", "both"])
@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_columns_that_are_not_given_come_from_the_model(name: str, options: dict, padding: str) -> None:
    model, temperature = tiny_model("qwen3"), 0.7
    rows = columns_by_hand(model, temperature)
    batch = make_batch(ROWS, padding, extra=2)
    config = CLASSES[name](**options)
    result = compute_token_weights(model, char_tokenizer(), *batch.tensors(), config, temperature=temperature)
    close(of_responses(result.weights, batch), plain_weights.METHODS[name](rows, **options), 2e-4)
    assert bool((result.weights[~batch.response_mask.bool()] == 0).all())
    assert result.spans == [row.span for row in rows]
    # One of the two given, the other computed.
    given = {"old_log_probs": full_width(batch, rows, "log_probs")}
    again = compute_token_weights(model, char_tokenizer(), *batch.tensors(), config, temperature=temperature, **given)
    close(of_responses(again.weights, batch), of_responses(result.weights, batch), 2e-4)


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_columns_that_are_given_are_read_and_the_model_is_not(name: str, options: dict) -> None:
    model = tiny_model("qwen3")
    batch = make_batch(ROWS)
    draw = torch.Generator().manual_seed(3)
    rows = [
        Row(
            rollout.advantage,
            (-3 * torch.rand(len(encode(rollout.response)), generator=draw)).tolist(),
            torch.rand(len(encode(rollout.response)), generator=draw).tolist(),
            AnswerSpan(*spans[-1]) if (spans := reference.boxed_spans(rollout.response.removesuffix(END))) else None,
        )
        for rollout in ROWS
    ]
    given = {"old_log_probs": full_width(batch, rows, "log_probs"), "entropy": full_width(batch, rows, "entropies")}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward")

    handle = model.register_forward_pre_hook(refuse)
    read = {column: values.requires_grad_() for column, values in given.items() if column in READS[name]}
    found = compute_token_weights(model, char_tokenizer(), *batch.tensors(), CLASSES[name](**options), **read)
    handle.remove()
    expected = plain_weights.METHODS[name](rows, **options)
    close(of_responses(found.weights, batch), expected, 1e-5)
    assert any(weight != 1 for row in expected for weight in row) or name == "stare"
    assert not found.weights.requires_grad
    assert not found.scores.requires_grad


def test_scores_are_what_was_read() -> None:
    batch = make_batch(ROWS)
    rows = [Row(rollout.advantage, [-0.5] * len(encode(rollout.response))) for rollout in ROWS]
    given = {"old_log_probs": full_width(batch, rows, "log_probs"), "entropy": full_width(batch, rows, "entropies")}
    for name, score in (("surprisal", 0.5), ("probability", math.exp(-0.5)), ("high_entropy", 1.0), ("stare", 0.5)):
        found = compute_token_weights(tiny_model(), char_tokenizer(), *batch.tensors(), CLASSES[name](), **given)
        known = found.scores[~found.scores.isnan()]
        torch.testing.assert_close(known, torch.full_like(known, score))
        assert known.numel() > 0
        assert bool(found.scores[~batch.response_mask.bool()].isnan().all())


@pytest.mark.parametrize("name", ["surprisal", "entropy", "entropy_bonus", "probability"])
def test_a_row_weighs_the_same_alone(name: str) -> None:
    for seed in range(6):
        rows = random_rows(seed)
        together = weights_of(CLASSES[name](), rows, extra=5)
        assert together == [weights_of(CLASSES[name](), [row])[0] for row in rows]


@pytest.mark.parametrize("name", CLASSES)
def test_rows_with_advantage_zero_weigh_one_unless_rows_are_compared(name: str) -> None:
    rows = [Row(0.0, row.log_probs, row.entropies, row.span, row.trained) for row in random_rows(9)]
    found = weights_of(CLASSES[name](**({"threshold": 10.0} if name == "stare" else {})), rows)
    assert (found == [row.ones() for row in rows]) == (name != "high_entropy")


@pytest.mark.parametrize("name", CLASSES)
def test_a_batch_without_rows_and_one_without_tokens(name: str) -> None:
    for rows in ([], [Row(1.0), Row(-1.0)]):
        found = result_of(CLASSES[name](), batch_of(rows, extra=3))
        assert found.weights_BT.shape == (len(rows), 3)
        assert not found.weights_BT.any()


@pytest.mark.parametrize("name", CLASSES)
def test_normalize_mass_restores_every_row_that_is_weighed(name: str) -> None:
    for seed in range(6):
        rows = [row for row in random_rows(seed) if row.advantage != 0]
        options = {"normalize_mass": True} | ({"threshold": 10.0} if name == "stare" else {})
        for row, weights in zip(rows, weights_of(CLASSES[name](**options), rows), strict=True):
            assert math.fsum(weights) == pytest.approx(len(row.tokens), rel=1e-5) or not any(weights)


@pytest.mark.parametrize("name", CLASSES)
def test_registration(name: str) -> None:
    method = methods()[name]
    assert method.signal_class is CLASSES[name]
    assert method.section == name
    built = method.build({"normalize_mass": True, "mask_truncated": None})
    assert built == CLASSES[name](normalize_mass=True)
    assert built.mask_truncated is True
    assert method.build({"mask_truncated": False}).mask_truncated is False
    assert built.name == name
    assert (built.cost, built.uses, built.needs_answer, built.reads) == ("0", "", False, READS[name])
    assert built.formula
    assert built.source
    with pytest.raises(ValueError, match="frozen"):
        built.normalize_mass = False


def test_options_of_other_methods_are_named() -> None:
    for name, option, owner in (
        ("surprisal", "rho", "high_entropy"),
        ("surprisal", "kappa", "entropy_bonus"),
        ("entropy", "denominator", "high_entropy"),
        ("high_entropy", "strength", "stare"),
        ("probability", "kappa", "entropy_bonus"),
    ):
        wanted = rf"^{name}\.{option} is not an option; it is one of [^.]*\b{owner}\b.*The options of {name} are "
        with pytest.raises(ValueError, match=wanted):
            methods()[name].build({option: 0.5})
    # An option of a map goes into reshaper_options, where it is checked; no method has it.
    with pytest.raises(
        ValueError,
        match=r"surprisal\.exponent is not an option of this method but of the reshaper power; set it",
    ):
        methods()["surprisal"].build({"exponent": 2.0})
    assert (
        methods()["surprisal"].build({"reshaper": "power", "reshaper_options": {"exponent": 3}}).reshaping.exponent == 3
    )
