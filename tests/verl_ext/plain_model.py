"""What a plain model says of the responses of ``pass_plan.py``, and how far verl's engine may be from it."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedModel

from grail_advantage import compute_token_weights
from grail_advantage.methods.shear import shear_scores
from tests.core.tiny_models import Rollout, char_tokenizer, make_batch
from tests.verl_ext import pass_plan as plan
from tests.verl_ext.pass_plan import BATCH, OWN

RTOL = 1e-4


def close(found: torch.Tensor, expected: torch.Tensor, rtol: float = RTOL) -> None:
    """Equal up to a part of the largest expected value; NaN where NaN is expected."""
    scale = float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * scale, equal_nan=True)


class Plain:
    """What a model says in one process, one response at a time and without sharding."""

    def __init__(self, models: dict[str, PreTrainedModel]) -> None:
        self.models = models
        self.scores = cache(self._scores)
        self.inference = cache(self._inference)

    def _scores(self, model: str, name: str, step: int = 0) -> dict[Rollout, torch.Tensor]:
        """Scores of each response's tokens."""
        signal, temperature, _ = OWN[name]
        rollouts = BATCH if name in plan.SALIENCY else plan.SHORT
        batch = make_batch(rollouts, padding="right")
        found = compute_token_weights(
            self.models[model], char_tokenizer(), *batch.tensors(), signal, temperature=temperature, step=step
        ).scores
        masks = batch.response_mask.bool()
        return {rollout: found[row, masks[row]] for row, rollout in enumerate(rollouts)}

    @torch.no_grad()
    def _inference(self, model: str, name: str, half: int) -> list[torch.Tensor]:
        """Log-probabilities and SHEAR's scores by hand."""
        signal, temperature, _ = OWN[name]
        _, rows = plan.pass_rows(name, half, 2)
        log_probs, hidden = [], []
        for row in rows:
            output = self.models[model](input_ids=row.tokens[None], output_hidden_states=True)
            distribution_SV = torch.log_softmax(output.logits[0].float() / temperature, dim=-1)
            start = row.start
            log_probs.append(distribution_SV[start - 1 : -1].gather(1, row.tokens[start:, None])[:, 0])
            hidden.append(output.hidden_states[-1][0, start:])
        if name.startswith("rlsd"):
            return log_probs
        members = [index for index, row in enumerate(rows) if row.group >= 0]
        settings = {name: getattr(signal, name) for name in ("epsilon", "iterations", "tolerance")}
        right = [rows[index].advantage > 0 for index in members]
        states = [hidden[index] for index in members]
        scores = shear_scores(states, right, window=signal.window, stride=signal.stride, **settings)
        expected = [torch.ones(row.length) for row in rows]
        for index, scores_T in zip(members, scores, strict=True):
            expected[index] = scores_T
        return expected
