"""Ground truth and gradient test on given wording, with a tiny model and one short problem."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from recipe.tiny.model import build_model
from study import real_model
from study.given_wording import Texts, choices, exact_advantages, texts_of
from study.real_model import last_blocks, right_probability
from study.task import study_tokenizer

TOKENIZER = study_tokenizer()
RECORD = {
    "question": "21 and 13, twice?",
    "answer": "21+13=<<21+13=34>>34 so\n34*2=<<34*2=68>>68 all\n#### 68",
}


@pytest.fixture(scope="module")
def texts() -> Texts:
    found = texts_of(RECORD, TOKENIZER)
    assert found is not None
    return found


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return build_model(TOKENIZER, 0).eval()


def test_probabilities_are_those_of_choosing_digit_after_digit(texts: Texts) -> None:
    logits = torch.randn(len(texts.rows[0].response), len(TOKENIZER), generator=torch.Generator().manual_seed(0))
    made = choices(logits[sorted(set(texts.places))], texts)
    log_B = made.of_texts(texts)
    assert float(log_B.exp().sum()) == pytest.approx(1, abs=1e-5), "the texts are all that can be written"
    by_hand, reached = {}, 1.0
    for place in sorted(set(texts.places)):
        numbers = [n for n, at in enumerate(texts.places, 1) if at == place]
        tokens = [texts.rows[0].response[place], *(texts.rows[n].response[place] for n in numbers)]
        shares = np.exp(logits[place, tokens].double().numpy())
        shares /= shares.sum()
        by_hand |= {n: reached * share for n, share in zip(numbers, shares[1:], strict=True)}
        reached *= shares[0]
    by_hand[0] = reached
    np.testing.assert_allclose(log_B.exp(), [by_hand[n] for n in range(len(texts.rows))], rtol=1e-4)
    # Advantages are differences of a martingale: their mean over what may be written is 0, and they add up to the reward.
    found = exact_advantages(texts, made)
    for number, advantage_T in enumerate(found):
        assert advantage_T.sum() == pytest.approx((number == 0) - by_hand[0], abs=1e-6)
    place = min(texts.places)
    means = sum(by_hand[n] * advantage_T[place] for n, advantage_T in enumerate(found))
    assert means == pytest.approx(0, abs=1e-6)


def test_the_update_of_uniform_and_the_gradient_are_those_of_finite_differences(
    texts: Texts, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "COMPARED", ("uniform", "random_token", "oracle"))
    count_B = np.zeros(len(texts.rows), dtype=np.int64)
    count_B[[0, 1, 4]] = 5, 2, 1
    monkeypatch.setattr(real_model, "draw", lambda *_: count_B)
    parameters = last_blocks(model, 1)
    found = real_model.measure_problem(model, TOKENIZER, texts, parameters, np.random.default_rng(0))
    accuracy_P = real_model._gradient(right_probability(model, texts), parameters)
    rate, direction = 2e-2, torch.randn(accuracy_P.shape, generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()

    def values() -> tuple[float, float]:
        with torch.no_grad():
            log_probs = real_model._log_probs(model, texts.rows[:1])[0].double()
            log_B = choices(log_probs[sorted(set(texts.places))], texts).of_texts(texts)
        return float(log_B[0].exp()), float(5 * 3 / 8 * log_B[0] - 2 * 5 / 8 * log_B[1] - 5 / 8 * log_B[4])

    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            at = 0
            for parameter in parameters:
                step = direction[at : at + parameter.numel()].view_as(parameter)
                parameter += sign * (rate if sign == 1 else 2 * rate) * step
                at += parameter.numel()
        ends.append(values())
    slopes = [(first - second) / (2 * rate) for first, second in zip(*ends, strict=True)]
    assert float(accuracy_P @ direction) == pytest.approx(slopes[0], rel=0.02, abs=1e-6)
    assert float(found.updates["uniform"] @ direction) == pytest.approx(slopes[1], rel=0.02, abs=1e-3)
