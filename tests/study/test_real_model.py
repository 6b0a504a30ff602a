"""Updates of the gradient test on a real model's kind of texts, against a plain loop; the model is tiny and random."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe.tiny.model import build_model
from study.given_wording import Texts, texts_of
from study.real_model import COMPARED, DRAWS, _chosen, draw, last_blocks, measure_problem
from study.task import study_tokenizer

TOKENIZER = study_tokenizer()

RECORD = {
    "question": "He has 3 apples and buys 4 times as many. How many has he?",
    "answer": "He buys 3*4=<<3*4=12>>12 apples\nHe has 3+12=<<3+12=15>>15 apples\n#### 15",
}


@pytest.fixture(scope="module")
def texts() -> Texts:
    found = texts_of(RECORD, TOKENIZER)
    assert found is not None and len(found.rows) > 3
    return found


def plain_update(model, texts: Texts, advantages: dict[int, float], parameters, counts: np.ndarray) -> torch.Tensor:
    """Ascent direction where every token of a text has its advantage: a forward for each text, a log-softmax over what can be
    chosen at each place."""
    total = torch.zeros(())
    for n, row in enumerate(texts.rows):
        logits = model(input_ids=torch.tensor([[*row.prompt, *row.response]])).logits[0]
        for place in sorted(set(texts.places)):
            here = [texts.tokens[k] for k, at in enumerate(texts.places) if at == place]
            options = [texts.rows[0].response[place], *here]
            departs = texts.places[n - 1] if n else len(row.response)
            if place > departs:
                break
            taken = options.index(row.response[place])
            log_probs = logits[len(row.prompt) + place - 1, options].log_softmax(0)
            total = total + float(counts[n]) * advantages[n] * log_probs[taken]
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, parameters)])


def test_updates_are_those_of_a_plain_loop(texts: Texts) -> None:
    model = build_model(TOKENIZER, 0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    parameters = last_blocks(model, 1)
    found = measure_problem(model, TOKENIZER, texts, COMPARED[3], (), parameters, np.random.default_rng(3))
    made = _chosen(model, texts)
    counts = draw(made.of_texts(texts).detach(), np.random.default_rng(3))
    assert counts.sum() == DRAWS and 0 < counts[0] < DRAWS
    mean = counts[0] / DRAWS
    whole = {n: float(n == 0) - mean for n in range(len(texts.rows))}
    right = {n: max(0.0, advantage) for n, advantage in whole.items()}
    wrong = {n: min(0.0, advantage) for n, advantage in whole.items()}
    for name, advantages in (("uniform", whole), ("right_only", right), ("wrong_only", wrong)):
        plain = plain_update(model, texts, advantages, parameters, counts)
        torch.testing.assert_close(found.updates[name], plain, rtol=1e-3, atol=1e-6 + 1e-4 * float(plain.abs().max()))
    assert found.updates["results_mask"].equal(found.updates["right_only"]), "by construction"
    assert not found.updates["random_mask"].equal(found.updates["right_only"])
    assert set(found.updates) == {arm.name for arm in COMPARED[3]} and not found.figures
