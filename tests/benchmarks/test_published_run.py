"""The study of the published run: what its trainings multiply, add and draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.published_run import CAP, RUNS, Rollouts, _add_gradient, _roll_out, log_mass
from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, prompt_ids, sample, uniform
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import problems


def test_log_mass() -> None:
    logits = [[0.0, 1.0, 2.0, -1.0], [3.0, 3.0, 0.0, 3.0]]
    for row, found in zip(logits, log_mass(torch.tensor(logits), 2).tolist(), strict=True):
        shares = sorted((math.exp(x) / sum(map(math.exp, row)) for x in row), reverse=True)
        assert found == pytest.approx(math.log(shares[0] + shares[1]))


def test_top_k_draws_from_the_likeliest_alone() -> None:
    """And as often as their probabilities over one another say."""
    model, tokenizer = load_shipped()
    prompt = prompt_ids(tokenizer, problems("train", 1)[0])
    drawn = [one[0] for one in sample(model, tokenizer, [prompt] * 4000, uniform(0, 4000, 1), temperature=3.0, top_k=3)]
    with torch.no_grad():
        best = (model(torch.tensor([prompt])).logits[0, -1].double() / 3).topk(3)
    assert set(drawn) == set(best.indices.tolist())
    shares = [drawn.count(token) / 4000 for token in best.indices.tolist()]
    assert shares == pytest.approx(best.values.softmax(dim=0).tolist(), abs=0.03)


@pytest.mark.parametrize("run", ["corrected", "ratio"])
def test_the_gradient_is_that_of_the_whole_batch(run: str) -> None:
    """Response by response, without leaving any out."""
    model, tokenizer = load_shipped()
    rollouts = _roll_out(model, tokenizer, problems("train", 2), seed=0, batch=0, top_k=3)
    ratio_B = rollouts.ratio_B.clone()
    assert (ratio_B < 1).all()
    ratio_B[1] = CAP + 1
    rollouts = Rollouts(*rollouts[:-1], ratio_B)
    generator = torch.Generator().manual_seed(0)
    advantages_BL = torch.randn(rollouts.padded.ids_BL.shape, generator=generator) * rollouts.padded.response_BL
    advantages_BL[0] = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    _add_gradient(model, rollouts, advantages_BL, RUNS[run])
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    model.zero_grad()
    total, clipped = torch.zeros(()), 0
    for row in range(len(rollouts.padded.ids_BL)):
        places = rollouts.padded.response_BL[row].nonzero()[:, 0].tolist()
        ids = rollouts.padded.ids_BL[row, : places[-1] + 1]
        log_probs = model(ids[None]).logits[0].log_softmax(dim=-1)
        factor = 1.0 if run == "corrected" else 0.0 if row == 1 else float(ratio_B[row])
        for place in places:
            moved = (log_probs[place - 1, ids[place]] - rollouts.log_probs_BL[row, place]).exp()
            advantage = advantages_BL[row, place]
            bounded = moved.clamp(0.8, 1.28)
            clipped += bool(bounded != moved)
            total = total - factor * torch.minimum(moved * advantage, bounded * advantage)
    (total / (len(rollouts.padded.ids_BL) * MAX_RESPONSE_TOKENS)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert clipped > 20
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
