"""Of an incorrect response the last step weighs most: ``decay`` for each step that follows, as in MRPO (arXiv 2606.31825)."""

import torch

from grail_advantage import Method, Weights, option, register
from grail_advantage.answers.expressions import compile_expression
from grail_advantage.answers.text import TokenTexts
from grail_advantage.methods.text import cut


@register("decayed_steps")
class DecayedSteps(Method):
    reads = frozenset({"tokenizer"})
    gate: str = "wrong"
    decay: float = option(0.8, "weight of a step over that of the next one", gt=0, le=1)

    def scores(self, r, of_pass):  # how many steps follow each token's
        texts = TokenTexts(r.tokenizer)
        separator = compile_expression(r"\n+", "separator")
        steps = [cut(texts(ids), texts.have_bytes(ids), separator)[0] for ids in r.tokens.numpy()]
        return torch.tensor([(of_row.max() - of_row).tolist() for of_row in steps]).float()

    def weights(self, scores, among, r):
        return Weights(self.decay**scores)
