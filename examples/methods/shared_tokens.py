"""The more correct responses to the prompt have a token, the less it is blamed in an incorrect one."""

from typing import Literal

import torch

from grail_advantage import Method, Weights, register


@register("shared_tokens")
class SharedTokens(Method):
    reads = frozenset({"groups"})
    gate: Literal["wrong", "correct", "all"] = "wrong"

    def scores(self, r, of_pass):
        scores = torch.ones(r.mask.shape)
        for index in self.select(r).nonzero().flatten():
            right = r.tokens[(r.groups == r.groups[index]) & (r.advantages > 0)]
            if len(right):
                scores[index] -= (
                    torch.stack([torch.isin(r.tokens[index], tokens) for tokens in right])
                    .float()
                    .mean(dim=0)
                )
        return scores

    def weights(self, scores, among, r):
        return Weights(scores)
