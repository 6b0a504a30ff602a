"""RLSD against a plain computation, hand-worked weights, and the prompts that it builds for real tokenizers."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grail_advantage import TokenWeights, compute_token_weights
from grail_advantage.data import Example, Weighed
from grail_advantage.methods.rlsd import REQUEST, Rlsd
from tests.core.common import rollouts_of, watch_inputs, weighed
from tests.core.tiny_models import Rollout, char_tokenizer, encode, make_batch, plain_columns, tiny_model

SHORT = "Given {privileged}, tell it in your words."
BRACKETS = """\
{%- for message in messages %}{{ "[" + message.role + "]" + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ "[" + (name or "assistant") + "]" }}{% endif %}"""
"""Chat template of the tiny model; it knows one option, ``name``."""


def columns(gold: Any) -> dict[str, Any]:
    return {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": gold}}


def example(question: Any, gold: Any = "5", **options: Any) -> Example:
    return Example([{"role": "user", "content": question}], columns(gold), options)


# What the weights are, given D.


def weigh(changes: list[list[float]], advantages: list[float], step: int = 0, **options: Any) -> Weighed:
    """Of responses without padding, from what the response's log-probabilities change by."""
    of_pass = torch.tensor(changes)
    asked, columns = [example("?")] * len(changes), {"old_log_probs": torch.zeros_like(of_pass)}
    ids, parts = [[0] * of_pass.shape[1]] * len(changes), {"examples": asked, "columns": columns, "step": step}
    return weighed(Rlsd(**options), rollouts_of(ids, advantages, tokenizer=tiny_tokenizer(), **parts), of_pass)


def test_bounds_gate_and_mass() -> None:
    changes = [math.log(1.1), math.log(0.9), math.log(2.0), math.log(0.5), 0.0]
    w = weigh([changes, changes, changes], [2.0, -0.5, 0.0])
    # The ratio of an incorrect response becomes its inverse before the clip.
    assert w.high.nonzero().tolist() == [[0, 2], [1, 3]] and w.low.nonzero().tolist() == [[0, 3], [1, 2]]
    only = weigh([changes, changes, changes], [2.0, -0.5, 0.0], negative_only=True).weights
    assert torch.equal(only[1], w.weights[1]) and only[0].tolist() == [1.0] * 5
    scaled = weigh([changes], [2.0], normalize_mass=True).weights
    torch.testing.assert_close(scaled[0], w.weights[0] * 5 / w.weights[0].sum())


def test_lam_falls_and_needs_no_pass_once_it_is_0() -> None:
    cases = [(0, 10**6, 1.1), (None, 7, 1.1), (50, 0, 1.1), (50, 25, 1.05), (50, 49, 1.002)]
    for lam_steps, step, upper in cases:
        w = weigh([[5.0, -5.0, 0.0]], [1.0], step, lam_steps=lam_steps)
        torch.testing.assert_close(w.weights, torch.tensor([[upper, 2 - upper, 1.0]]))
        assert (int(w.high.sum()), int(w.low.sum())) == (1, 1)
    assert weigh([[5.0]], [1.0], 49, lam_steps=50).selected.all()
    for step in (50, 51, 10**6):
        w = weigh([[5.0, -5.0, 0.0]], [1.0], step, lam_steps=50)
        assert w.weights.tolist() == [[1.0] * 3] and not w.selected.any()


# The whole way with a tiny model, against loops over Python floats.


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.chat_template = BRACKETS
    return tokenizer


@cache
def subject(family: str = "qwen3") -> Any:
    """A float64 model that no test may change."""
    return tiny_model(family, max_position_embeddings=1024).double()


def plain_log_probs(model: Any, prompt: str, response: str, temperature: float) -> list[float]:
    """Of each response token. The tiny vocabulary has no line break."""
    return plain_columns(model, encode(prompt.replace("\n", "")), encode(response), temperature)[0]


def plain_weights(teacher: list[float], old: list[float], advantage: float, lam: float, epsilon: float) -> list[float]:
    weights = []
    for new, before in zip(teacher, old, strict=True):
        ratio = math.exp(new - before) if advantage > 0 else math.exp(before - new)
        weights.append(1 - lam + lam * min(max(ratio, 1 - epsilon), 1 + epsilon) if advantage else 1.0)
    return weights


ROWS = [
    ("Two plus three?", r"Two and three make \boxed{5}.<end>", 1.0),
    ("Two plus three?", r"I say \boxed{6}", -0.5),
    ("Seven?", "No idea", -1.5),
    ("Eight?", "Eight is eight", 0.0),
    ("Only a prompt", "", -1.0),
]


BATCH = make_batch([Rollout(f"[user]{asked}[assistant]", said, advantage) for asked, said, advantage in ROWS], "both")


def run_rows(
    config: Rlsd,
    examples: list[Example | None],
    *,
    family: str = "qwen3",
    temperature: float = 1.0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **given: Any,
) -> tuple[TokenWeights, list[list[float]]]:
    """Every response of ``ROWS`` through the plain host; its result, and the weights of each response."""
    tokenizer = tokenizer if tokenizer is not None else tiny_tokenizer()
    result = compute_token_weights(
        subject(family), tokenizer, *BATCH.tensors(), config, temperature=temperature, examples=examples, **given
    )
    return result, BATCH.of_responses(result.weights)


EXAMPLES = [example(asked, gold) for (asked, _, _), gold in zip(ROWS, ["5", "5", "7", "8", "9"], strict=True)]


@pytest.mark.parametrize(
    ("family", "temperature", "request_text", "given_old", "lam", "epsilon"),
    [
        ("qwen3", 1.0, SHORT, None, 0.6, 0.9),
        ("llama", 0.7, REQUEST, None, 1.0, 0.5),
        ("qwen3", 0.7, SHORT, -2.0, 0.25, 0.95),
    ],
)
def test_plain_computation(
    family: str, temperature: float, request_text: str, given_old: float | None, lam: float, epsilon: float
) -> None:
    """Given log-probabilities are what D starts from, also where they are not the model's own."""
    config = Rlsd(lam=lam, epsilon=epsilon, request=request_text)
    given = {} if given_old is None else {"old_log_probs": torch.where(BATCH.response_mask == 1, given_old, 123.0)}
    _, weights_of_rows = run_rows(config, EXAMPLES, family=family, temperature=temperature, **given)
    distinct = set()
    for (asked, said, advantage), of_row, weights in zip(ROWS, EXAMPLES, weights_of_rows, strict=True):
        request = request_text.replace("{privileged}", of_row.columns["reward_model"]["ground_truth"])
        old = plain_log_probs(subject(family), f"[user]{asked}[assistant]", said, temperature)
        teacher = plain_log_probs(subject(family), f"[user]{asked}\n\n{request}[assistant]", said, temperature)
        old = old if given_old is None else [given_old] * len(old)
        assert weights == pytest.approx(plain_weights(teacher, old, advantage, lam, epsilon), abs=1e-6)
        distinct |= {round(weight, 6) for weight in weights}
    assert len(distinct) > 10, "not only the bounds"


NOTHING = [None, "", " \n ", [], [None, "", float("nan")], float("nan"), np.array([])]


def test_rows_without_privileged_text() -> None:
    """Or without its column, or a user message: they train as in GRPO, exactly and without a forward, and alone."""
    given = {"old_log_probs": torch.full(BATCH.input_ids.shape, -2.0), "tokens": 1}
    embeddings = subject("qwen3").get_input_embeddings()
    with watch_inputs(embeddings) as forwards:
        _, every = run_rows(Rlsd(request=SHORT), EXAMPLES, **given)
    assert len(forwards) == 3 and all(weights != [1.0] * len(weights) for weights in every[:3])
    asked, system = EXAMPLES[0].messages, [{"role": "system", "content": "Be brief."}]
    without = [Example(asked, columns(nothing), {}) for nothing in NOTHING]
    for broken in [*without, None, Example(asked, {}, {}), Example(system, columns("5"), {})]:
        with watch_inputs(embeddings) as forwards:
            result, weights_of_rows = run_rows(Rlsd(request=SHORT), [broken, *EXAMPLES[1:]], **given)
        assert weights_of_rows == [[1.0] * len(weights_of_rows[0]), *every[1:]] and len(forwards) == 2
        assert (result.stats["non_finite_rate"], result.stats["selected_rate"]) == (0.0, 0.5)


def test_examples_and_a_template_are_needed() -> None:
    with pytest.raises(ValueError, match="rlsd reads examples"):
        run_rows(Rlsd(), None)
    with pytest.raises(ValueError, match=r"rlsd .*chat template"):
        run_rows(Rlsd(), EXAMPLES, tokenizer=char_tokenizer())
