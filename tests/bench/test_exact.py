"""Exact accuracy and advantages: a policy that is never wrong, enumeration, plain forwards and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from bench.exact import (
    Text,
    accuracy_gradients,
    correct_probabilities,
    correct_texts,
    corrected,
    deciding_tokens,
    first_wrong,
    token_advantages,
)
from bench.task import TASKS, WORDS, BenchProblem, read, read_tokens, task_problems
from tests.bench.never_wrong import TOKENIZER, NeverWrong
from verl_cpu.tiny.model import build_model
from verl_cpu.tiny.sampling import prompt_ids

CHAIN = BenchProblem("7+5-3", 7, (("+", 5), ("-", 3)))
CHOICE = BenchProblem("4(+5|-3)", 4, (("+", 5),), ((("+", 5), ("-", 3)),))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """Its logits are scaled up, so that probabilities are far from equal."""
    model = build_model(TOKENIZER, 0)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model.eval()


def plain_log_probs(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    """Of the next token after ``ids``; one forward without padding."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)


@torch.no_grad()
def exact_accuracy(model, texts: list[Text]) -> float:
    return float(correct_probabilities(model, TOKENIZER, texts).double().mean())


def texts_of(problem: BenchProblem, *written: str) -> list[Text]:
    responses = [TOKENIZER.encode(text) for text in written]
    deciding = [deciding_tokens(read_tokens(problem, response, TOKENIZER)) for response in responses]
    return [Text(prompt_ids(TOKENIZER, problem), *one) for one in zip(responses, deciding, strict=True)]


def advantages_of(model, problem: BenchProblem, *written: str) -> list[np.ndarray | None]:
    responses = [TOKENIZER.encode(text) for text in written]
    rights = [corrected(problem, ids, read_tokens(problem, ids, TOKENIZER), TOKENIZER) for ids in responses]
    prompts = [prompt_ids(TOKENIZER, problem)] * len(written)
    return token_advantages(model, TOKENIZER, prompts, responses, rights, [problem] * len(written))


@pytest.mark.parametrize("task", TASKS)
def test_a_policy_that_is_never_wrong_has_accuracy_1_and_advantages_0(task: str) -> None:
    problems = task_problems(task, "train", 12, 0)
    texts = correct_texts(problems, TOKENIZER, 0)
    policy = NeverWrong(texts)
    words = sum(token in policy.words for _, ids, deciding in texts for token in np.array(ids)[deciding])
    assert (words > 20) == (task == "choices")
    assert exact_accuracy(policy, texts) == pytest.approx(1, abs=1e-6)
    prompts, responses, _ = zip(*texts, strict=True)
    advantages = token_advantages(policy, TOKENIZER, prompts, responses, responses, problems)
    assert np.concatenate(advantages) == pytest.approx(0, abs=1e-6)


def test_the_deciding_tokens_by_hand() -> None:
    """The word, the result and its end, and the box's content and its end; no filler, no aside, no left side."""
    written = "ok first 4+5=9;(2+6=8)now \\boxed{9}"
    ((_, _, deciding_T),) = texts_of(CHOICE, written)
    tokens = zip(TOKENIZER.encode(written), deciding_T, strict=True)
    assert "".join(TOKENIZER.decode(token) for token, decides in tokens if decides) == "first9;9}"


def test_accuracy_is_that_of_every_text_enumerated() -> None:
    """All texts that differ from the given one in deciding tokens, each scored by reading it; of six tokens, others are ruled
    out."""
    problem = BenchProblem("4+5", 4, (("+", 5),))
    prompt = prompt_ids(TOKENIZER, problem)
    texts = texts_of(problem, "so 4+5=9;\\boxed{9}")
    allowed = TOKENIZER.convert_tokens_to_ids(list("910;}"))
    model = build_model(TOKENIZER, 0).eval()
    ruled_out = torch.full((len(TOKENIZER),), -1e4)
    ruled_out[allowed] = 0
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + ruled_out)
    ends: dict[tuple[int, ...], float] = {tuple(prompt): 1.0}
    for token, decides in zip(*texts[0][1:], strict=True):
        longer = {}
        for ids, probability in ends.items():
            if not decides:
                longer[*ids, token] = probability
                continue
            chances = plain_log_probs(model, list(ids)).exp()
            longer |= {(*ids, choice): probability * float(chances[choice]) for choice in allowed}
        ends = longer
    assert len(ends) == 5**4 and sum(ends.values()) == pytest.approx(1)
    right = 0.0
    for ids, probability in ends.items():
        text = TOKENIZER.decode(ids[len(prompt) :])
        reading = read(problem, text)
        if reading.box is not None and not reading.wrong and len(reading.steps) == 1 and ";" in text:
            right += probability
    assert 1e-12 < right < 0.5
    assert exact_accuracy(model, texts) == pytest.approx(right, rel=1e-4)


def test_a_wrong_word_costs_what_the_correct_one_would_have_won(model: Qwen3ForCausalLM) -> None:
    """Over the two words the advantages have mean zero under the policy that must write one of them."""
    written = ["first 4+5=9;\\boxed{9}", "then 4-3=1;\\boxed{1}"]
    right_T, wrong_T = advantages_of(model, CHOICE, *written)
    right, wrong = map(TOKENIZER.encode, written)
    place = first_wrong(wrong, right)
    log_probs = plain_log_probs(model, [*prompt_ids(TOKENIZER, CHOICE), *right[:place]])
    first, then = (float(log_probs[tokens[place]].exp()) for tokens in (right, wrong))
    assert wrong_T[place] < 0 < right_T[place]
    assert first * right_T[place] + then * wrong_T[place] == pytest.approx(0, abs=1e-4 * first * right_T[place])
    assert not wrong_T[place + 1 :].any()


def test_token_advantages_are_differences_of_the_value_by_plain_forwards(model: Qwen3ForCausalLM) -> None:
    """The value of a prefix: the product of the correct deciding tokens' probabilities from there on."""
    prompt, right = prompt_ids(TOKENIZER, CHAIN), TOKENIZER.encode("7+5=12;12-3=9;\\boxed{9}")
    right_T, wrong_T, unknown = advantages_of(
        model, CHAIN, "7+5=12;12-3=9;\\boxed{9}", "7+5=14;14-3=11;\\boxed{11}", "7+5=12;\\boxed{9}"
    )
    deciding_T = texts_of(CHAIN, "7+5=12;12-3=9;\\boxed{9}")[0].deciding_T
    log_probs = [plain_log_probs(model, [*prompt, *right[:place]]) for place in range(len(right))]

    def value(place: int) -> float:
        own = [float(log_probs[i][right[i]]) for i in range(place, len(right)) if deciding_T[i]]
        return float(np.exp(sum(own)))

    scale = value(0)
    for place in range(len(right)):
        assert right_T[place] / scale == pytest.approx((value(place + 1) - value(place)) / scale, rel=1e-3, abs=1e-3)
    # "14" and "12" part at their second digit; from there on nothing can be won or lost.
    assert wrong_T[:5] == pytest.approx(right_T[:5])
    assert wrong_T[5] == pytest.approx(-value(5), rel=1e-4)
    assert not wrong_T[6:].any()
    assert unknown is None, "a step is missing"


def test_gradients_are_those_of_finite_differences() -> None:
    """Central differences of two steps, extrapolated: their error is of fourth order."""
    model = build_model(TOKENIZER, 0).eval().double()
    texts = correct_texts(task_problems("choices", "train", 4, 0), TOKENIZER, 0)
    parts_CN = accuracy_gradients(model, TOKENIZER, texts, 2)
    assert len(parts_CN) == 2 and all(parameter.grad is None for parameter in model.parameters())
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(len(start), generator=generator, dtype=torch.float64) * parts_CN.mean(0).abs().sqrt()
    direction /= direction.norm()

    def slope(part: list[Text], step: float) -> float:
        ends = []
        for sign in (1, -1):
            nn.utils.vector_to_parameters(start + sign * step * direction, model.parameters())
            ends.append(exact_accuracy(model, part))
        return (ends[0] - ends[1]) / (2 * step)

    for index, gradient_N in enumerate(parts_CN):
        part = texts[2 * index : 2 * index + 2]
        extrapolated = (4 * slope(part, 0.05) - slope(part, 0.1)) / 3
        assert extrapolated == pytest.approx(float(gradient_N @ direction), rel=1e-4, abs=0)


@pytest.mark.parametrize(
    ("problem", "written", "right"),
    [
        (CHAIN, "so 7+5=14;(1+1=3)14-3=11;\\boxed{11}", "so 7+5=12;(1+1=3)12-3=9;\\boxed{9}"),
        (CHAIN, "7+5=12;12-3=9;\\boxed{8}", "7+5=12;12-3=9;\\boxed{9}"),
        (CHOICE, "ok then 4-3=1;\\boxed{1}", "ok first 4+5=9;\\boxed{9}"),
    ],
)
def test_a_correction_keeps_the_wording(problem: BenchProblem, written: str, right: str) -> None:
    ids = TOKENIZER.encode(written)
    corrected_ids = corrected(problem, ids, read_tokens(problem, ids, TOKENIZER), TOKENIZER)
    assert TOKENIZER.decode(corrected_ids) == right
    assert corrected(problem, corrected_ids, read_tokens(problem, corrected_ids, TOKENIZER), TOKENIZER) == corrected_ids
    assert WORDS == ("first", "then")
