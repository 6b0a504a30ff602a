import torch

from grail_advantage import Method, Weights, option, register
from grail_advantage.answers.text import TokenTexts


@register("digits")
class Digits(Method):
    weight: float = option(2.0, "of tokens with a digit", ge=0)

    def scores(self, r, of_pass):
        texts = TokenTexts(r.tokenizer)
        return torch.tensor(
            [[any(map(str.isdigit, text)) for text in texts(ids)] for ids in r.tokens.numpy()]
        ).float()

    def weights(self, scores, among, r):
        return Weights(torch.where(scores > 0, self.weight, 1.0))
