"""The inverted control, as of causal spans (arXiv 2602.09331): the most important token has the weight of the least."""

from grail_advantage import Grail, register


@register("inverted_grail")
class InvertedGrail(Grail):
    def weights(self, scores, among, r):
        w = super().weights(scores, among, r)
        for values, tokens in zip(w.values, among, strict=True):
            by_weight = tokens.nonzero().flatten()[values[tokens].argsort()]
            values[by_weight] = values[by_weight.flip(0)]
        return w
