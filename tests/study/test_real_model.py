"""Ground truth and gradient test on given wording, with a tiny model and one short problem."""

from __future__ import annotations

import json
from pathlib import Path

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


def written(texts: Texts, row: int) -> str:
    return TOKENIZER.decode(texts.rows[row].response, skip_special_tokens=True)


def test_texts_depart_from_the_right_one_at_a_digit_and_are_carried_on(texts: Texts) -> None:
    assert written(texts, 0) == "21+13=34 so\n34*2=68 all\nThe final answer is \\boxed{68}."
    assert len(texts.rows) > 6 and len({(*one,) for one in zip(texts.places, texts.tokens, strict=True)}) == len(
        texts.places
    )
    for number, (place, token) in enumerate(zip(texts.places, texts.tokens, strict=True), 1):
        row = texts.rows[number]
        assert row.response[:place] == texts.rows[0].response[:place] and row.response[place] == token
        first, second = written(texts, number).split("\n")[:2]
        start = first.removeprefix("21+13=").removesuffix(" so")
        result = second.removeprefix(f"{start}*2=").removesuffix(" all")
        assert (start == "34") == (place > first.index("so")) and (start == "34" or int(result) == 2 * int(start))
        assert f"boxed{{{result}}}" in written(texts, number)
        marked = np.flatnonzero(row.read.error_T)
        assert marked[0] == place and "".join(TOKENIZER.decode([row.response[at]]) for at in marked).isdigit()


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


def test_both_tables_of_a_file(tmp_path: Path, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "LEAST", 0.0)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in [RECORD, {**RECORD, "answer": "#### 3"}, RECORD]))
    (said,) = real_model.measure(model, TOKENIZER, data, count=2, longest=200, blocks=2)
    lines = said.splitlines()
    assert lines[0].startswith("2 problems, groups of 8 texts") and "Last 2 of 3 blocks" in lines[0]
    arms = [line for line in lines if line.startswith("| ")]
    assert len(arms) == 1 + len(real_model.COMPARED) + 1 + len(real_model.SCORED) + 2
    baseline = next(line for line in lines if "it is a result token" in line).split("|")
    assert baseline[3].strip().startswith("0.50"), "among results it is no better than chance"
    with pytest.raises(ValueError, match="raise --longest"):
        next(real_model.measure(model, TOKENIZER, data, count=2, longest=20, blocks=2))
    with pytest.raises(ValueError, match="--blocks=9 must lie in 1 to 3"):
        last_blocks(model, 9)
