"""Accuracy without sampling against enumeration, sampling and finite differences; exact token advantages against both."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from study.exact import (
    Texts,
    accuracy_gradient,
    deciding_tokens,
    exact_accuracy,
    right_texts,
    token_advantages,
)
from study.task import REGIMES, WORDS, StudyProblem, read, read_tokens, study_problems, study_tokenizer

TOKENIZER = study_tokenizer()
CHAIN = StudyProblem("7+5-3", 7, (("+", 5), ("-", 3)), (None, None))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """Its logits are scaled up, so that probabilities are far from equal."""
    model = build_model(TOKENIZER, 0)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model.eval()


def plain_log_probs(model: Qwen3ForCausalLM, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of the next token behind ``ids``; one forward without padding or cache."""
    with torch.no_grad():
        return (model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature).log_softmax(-1)


def texts_of(problem: StudyProblem, *written: str) -> Texts:
    responses = [TOKENIZER.encode(text) for text in written]
    decided = [deciding_tokens(read_tokens(problem, response, TOKENIZER)) for response in responses]
    return Texts([prompt_ids(TOKENIZER, problem)] * len(written), responses, decided)


def test_accuracy_is_that_of_every_text_enumerated(temperature: float = 0.6) -> None:
    """All texts that differ from the given one in deciding tokens, each judged by reading it; of six tokens, others are ruled
    out."""
    problem = StudyProblem("4+5", 4, (("+", 5),), (None,))
    prompt = prompt_ids(TOKENIZER, problem)
    texts = texts_of(problem, "so 4+5=9;\\boxed{9}")
    allowed = TOKENIZER.convert_tokens_to_ids(list("9810;}"))
    model = build_model(TOKENIZER, 0).eval()
    ruled_out = torch.full((len(TOKENIZER),), -1e4)
    ruled_out[allowed] = 0
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + ruled_out)
    ends: dict[tuple[int, ...], float] = {tuple(prompt): 1.0}
    for token, decides in zip(texts.responses[0], texts.decided[0], strict=True):
        longer = {}
        for ids, probability in ends.items():
            if not decides:
                longer[*ids, token] = probability
                continue
            chances = plain_log_probs(model, list(ids), temperature).exp()
            longer |= {(*ids, choice): probability * float(chances[choice]) for choice in allowed}
        ends = longer
    assert len(ends) == 6**4 and sum(ends.values()) == pytest.approx(1)
    right = 0.0
    for ids, probability in ends.items():
        text = TOKENIZER.decode(ids[len(prompt) :])
        found = read(problem, text)
        # As the wording has it: the step is written, and its end is.
        if found.box is not None and not found.errors and len(found.steps) == 1 and ";" in text:
            right += probability
    assert 1e-12 < right < 0.5
    assert exact_accuracy(model, TOKENIZER, texts, temperature=temperature) == pytest.approx(right, rel=1e-4)


class NeverWrong:
    """A policy that writes the given texts and, wherever wording is free, others, but never a wrong deciding token.

    At a deciding word it writes filler with probability 0.7, never the other word; elsewhere half of what decides nothing is
    left to other tokens.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = {
            (*p, *r): (len(p), d) for p, r, d in zip(texts.prompts, texts.responses, texts.decided, strict=True)
        }
        self._words = TOKENIZER.convert_tokens_to_ids(list(WORDS))
        self._filler = TOKENIZER.convert_tokens_to_ids("ok")

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        probabilities = torch.full((*input_ids.shape, len(TOKENIZER)), 0.0)
        for row, ids in enumerate(input_ids.tolist()):
            start, decided = next(found for text, found in self._texts.items() if tuple(ids[: len(text)]) == text)
            for place, token in enumerate(ids[1:]):
                response = place + 1 - start
                decides = 0 <= response < len(decided) and decided[response]
                own = 1.0 if decides else 0.5
                if decides and token in self._words:
                    own = 0.3
                probabilities[row, place, self._filler] = 1 - own
                probabilities[row, place, token] += own
        return SimpleNamespace(logits=probabilities.log())


@pytest.mark.parametrize("regime", REGIMES)
def test_a_policy_that_is_never_wrong_has_accuracy_1_and_advantages_0(regime: str) -> None:
    problems = study_problems(regime, "train", 12, 0)
    texts = right_texts(problems, TOKENIZER, 1, 0)
    policy = NeverWrong(texts)
    words = sum(
        token in policy._words for r, d in zip(texts.responses, texts.decided, strict=True) for token in np.array(r)[d]
    )
    assert (words > 20) == (regime == "choices")
    assert exact_accuracy(policy, TOKENIZER, texts) == pytest.approx(1, abs=1e-6)
    advantages = token_advantages(policy, TOKENIZER, problems, texts.prompts, texts.responses)
    assert np.concatenate(advantages) == pytest.approx(0, abs=1e-6)


def test_a_wrong_word_costs_what_the_right_one_would_have_won(model: Qwen3ForCausalLM) -> None:
    """Over the two words the advantages have mean zero under the policy that must write one of them."""
    problem = StudyProblem("4(+5|-3)", 4, (("+", 5),), (None,), ((("+", 5), ("-", 3)),))
    prompt = prompt_ids(TOKENIZER, problem)
    right, wrong = (
        TOKENIZER.encode(f"{text};\\boxed{{{end}}}") for text, end in (("first 4+5=9", 9), ("then 4-3=1", 1))
    )
    right_T, wrong_T = token_advantages(model, TOKENIZER, [problem] * 2, [prompt] * 2, [right, wrong])
    place = next(place for place, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b)
    log_probs = plain_log_probs(model, [*prompt, *right[:place]])
    first, then = (float(log_probs[tokens[place]].exp()) for tokens in (right, wrong))
    assert wrong_T[place] < 0 < right_T[place]
    assert first * right_T[place] + then * wrong_T[place] == pytest.approx(0, abs=1e-4 * first * right_T[place])
    assert not wrong_T[place + 1 :].any()


def test_gradient_is_that_of_finite_differences() -> None:
    """Central differences of two steps, extrapolated: their error is of fourth order, so that the step may be large beside the
    float32 of the model's norms. The model is not trained before, since no two processors train it alike."""
    model = build_model(TOKENIZER, 0).eval()
    texts = right_texts(study_problems("slips", "train", 3, 0), TOKENIZER, 1, 0)
    model.double()
    gradient = accuracy_gradient(model, TOKENIZER, texts)
    assert all(parameter.grad is None for parameter in model.parameters())
    generator = torch.Generator().manual_seed(0)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()

    def slope(direction: torch.Tensor, step: float) -> float:
        ends = []
        for sign in (1, -1):
            nn.utils.vector_to_parameters(start + sign * step * direction, model.parameters())
            ends.append(exact_accuracy(model, TOKENIZER, texts))
        return (ends[0] - ends[1]) / (2 * step)

    for _ in range(3):
        direction = torch.randn(len(start), generator=generator, dtype=torch.float64) * gradient.abs().sqrt()
        direction /= direction.norm()
        extrapolated = (4 * slope(direction, 0.05) - slope(direction, 0.1)) / 3
        assert extrapolated == pytest.approx(float(gradient @ direction), rel=1e-4, abs=0)


def test_token_advantages_are_differences_of_the_value_by_enumeration(model: Qwen3ForCausalLM) -> None:
    """The value of a prefix: the product of the right deciding tokens' probabilities behind it, each from a plain forward."""
    prompt = prompt_ids(TOKENIZER, CHAIN)
    right = TOKENIZER.encode("7+5=12;12-3=9;\\boxed{9}")
    wrong = TOKENIZER.encode("7+5=14;14-3=11;\\boxed{11}")
    right_T, wrong_T = token_advantages(model, TOKENIZER, [CHAIN] * 2, [prompt] * 2, [right, wrong])
    decided = texts_of(CHAIN, "7+5=12;12-3=9;\\boxed{9}").decided[0]
    log_probs = [plain_log_probs(model, [*prompt, *right[:place]]) for place in range(len(right))]

    def value(place: int) -> float:
        own = [float(log_probs[i][right[i]]) for i in range(place, len(right)) if decided[i]]
        return float(np.exp(sum(own)))

    scale = value(0)
    for place in range(len(right)):
        assert right_T[place] / scale == pytest.approx((value(place + 1) - value(place)) / scale, rel=1e-3, abs=1e-3)
    # "14" and "12" part at their second digit; from there on nothing can be won or lost.
    assert wrong_T[:5] == pytest.approx(right_T[:5])
    assert wrong_T[5] == pytest.approx(-value(5), rel=1e-4)
    assert not wrong_T[6:].any()
    # Mean zero over what the policy draws at a deciding token: the right one raises the value, any other loses it.
    for place in np.flatnonzero(decided):
        probability = float(log_probs[place][right[place]].exp())
        assert probability * right_T[place] - (1 - probability) * value(place) == pytest.approx(
            0, abs=1e-4 * value(place)
        )
    assert right_T[~decided] == pytest.approx(0, abs=1e-12)
