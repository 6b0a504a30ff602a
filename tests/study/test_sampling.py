"""The study's sampler against the plain one: equal greedy text, the right distribution, rows that do not touch each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from study import sampling
from study.sampling import sample
from study.task import study_problems, study_tokenizer

TOKENIZER = study_tokenizer()
PROMPTS = [prompt_ids(TOKENIZER, problem) for problem in study_problems("slips", "train", 6, 0)]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """It ends its responses at different lengths."""
    model = build_model(TOKENIZER, 0)
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    return model.eval()


def drawn(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((rows, tokens)))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_have_the_models_probabilities(model: Qwen3ForCausalLM, temperature: float) -> None:
    count = 3000
    found = sample(model, TOKENIZER, PROMPTS[:1] * count, drawn(count, 1), temperature=temperature)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].double()
    probability = (logits / temperature).softmax(-1)
    counts = torch.bincount(torch.tensor(found).flatten(), minlength=len(probability))
    likely = probability > 0.01
    assert likely.sum() > 3
    # Stratified would be closer; plain draws are within four deviations.
    deviation = (probability * (1 - probability) / count).sqrt()
    assert (counts / count - probability).abs()[likely].le(4 * deviation[likely]).all()


def test_a_rows_response_does_not_depend_on_its_neighbours(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end early leave the batch; the others go on as if alone."""
    with torch.no_grad():
        model.lm_head.weight[TOKENIZER.eos_token_id] *= 3
    numbers = drawn(24, 30)
    together = sample(model, TOKENIZER, PROMPTS * 4, numbers)
    assert len({len(response) for response in together}) > 2, "the rows end at different lengths"
    for row in (0, 5, 13, 23):
        assert sample(model, TOKENIZER, [(PROMPTS * 4)[row]], numbers[row : row + 1]) == [together[row]]
    monkeypatch.setattr(sampling, "ROWS_TOGETHER", 7)
    assert sample(model, TOKENIZER, PROMPTS * 4, numbers) == together
    ended = [response[-1] == TOKENIZER.eos_token_id for response in together]
    assert any(ended) and all(len(response) == 30 for response, end in zip(together, ended, strict=True) if not end)
