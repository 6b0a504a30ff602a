"""Of an incorrect response the last step weighs most: ``decay`` for each step that follows, as in MRPO (arXiv 2606.31825)."""

import torch

from grail_advantage import Method, Weights, option, register
from grail_advantage.methods.text import steps_of


@register("decayed_steps")
class DecayedSteps(Method):
    reads = frozenset({"tokenizer"})
    gate: str = "wrong"
    decay: float = option(0.8, "weight of a step over that of the next one", gt=0, le=1)

    def scores(self, r, of_pass):
        scores = torch.zeros(r.mask.shape)
        for index, (step, _) in steps_of(r, r.valid, r"\n+").items():
            # How many steps follow: of tokens in the steps 0, 0, 1, 2 these are 2, 2, 1, 0.
            scores[index] = torch.from_numpy(step.max() - step)
        return scores

    def weights(self, scores, among, r):
        return Weights(self.decay**scores)
