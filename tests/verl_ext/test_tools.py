"""Responses in which a tool wrote between the model's turns, in a step of the trainer: weights, advantages, answers and the
dump's label."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.core import reference
from tests.core.tiny_models import encode
from tests.verl_ext.one_step import made_up_saliency
from tests.verl_ext.test_one_step import ROWS, Step

KEY = "a_1_0"
"""An incorrect response."""
TURNS = [
    ("I ask for it;", True),
    (r"=\boxed{9}!", False),
    ("so it", True),
    ("?", False),
    (r" is \boxed{3}, ok<end>", True),
]
INTERRUPTED = [(r"I say \boxed{3", True), ("tool", False), ("} or so<end>", True)]


def _step(monkeypatch: pytest.MonkeyPatch, turns: list[tuple[str, bool]]) -> tuple[Step, torch.Tensor]:
    """A step whose response ``KEY`` has these turns, and the mask of the tokens that the model wrote."""
    step = Step(monkeypatch, [])
    ids = [encode(text) for text, _ in turns]
    mask_T = torch.tensor([wrote for (_, wrote), of_turn in zip(turns, ids, strict=True) for _ in of_turn])
    response_T = torch.tensor(list(itertools.chain(*ids)))
    step.store.rows[KEY] |= {
        "responses": response_T,
        "response_mask": mask_T.long(),
        "loss_mask": mask_T.long(),
        "rollout_log_probs": torch.full((len(response_T),), -0.1),
        "rm_scores": torch.zeros(len(response_T)),
    }
    return step, mask_T


def test_weights_are_those_of_the_models_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain computation has never seen the tool's tokens, but for the scores' positions."""
    step, mask_T = _step(monkeypatch, TURNS)
    found_T = step.run()[KEY]
    prompt = encode(next(prompt for key, prompt, *_ in ROWS if key == KEY))
    saliency_S = made_up_saliency(torch.tensor(prompt + step.store.rows[KEY]["responses"].tolist()))
    scores_T = saliency_S[len(prompt) - 1 : -1]  # each token's is that of the position before it
    text = "".join(text for text, wrote in TURNS if wrote).replace("<end>", "$")
    (span,) = reference.boxed_spans(text)
    # Positions after the answer have no gradient.
    answer_end = len(prompt) + "".join(text for text, _ in TURNS).rindex("}") + 1
    scores_T = torch.where(torch.arange(len(scores_T)) + len(prompt) - 1 < answer_end, scores_T, 0.0)
    weights = reference.row_weights(scores_T[mask_T].tolist(), span, -1.0, reference.resolve("official"))
    assert len(set(weights)) > 5
    base = float(found_T[mask_T][-1])
    assert base < 0
    torch.testing.assert_close(found_T[mask_T], base * torch.tensor(weights), rtol=1e-4, atol=1e-5)
    assert (found_T[~mask_T] == 0).all()


def test_an_answer_that_a_tool_interrupts_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    step, mask_T = _step(monkeypatch, INTERRUPTED)
    found_T = step.run()[KEY]
    assert len(step.workers.own) == 2 and len(found_T[mask_T].unique()) == 1 and (found_T[mask_T] < 0).all()
    assert step.metrics["grail/answer_found_rate"] == 4 / 6
