"""A policy whose answer is known."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from bench.exact import Text
from bench.task import WORDS, task_tokenizer

TOKENIZER = task_tokenizer()


class NeverWrong:
    """It writes the given texts and, wherever wording is free, others, but never a wrong deciding token.

    At a deciding word it writes filler with probability 0.7, never the other word; elsewhere half of what decides nothing is
    left to filler.
    """

    def __init__(self, texts: list[Text]) -> None:
        self._texts = {(*p, *r): (len(p), d) for p, r, d in texts}
        self.words = TOKENIZER.convert_tokens_to_ids(list(WORDS))
        self._filler = TOKENIZER.convert_tokens_to_ids("ok")

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        probabilities = torch.full((*input_ids.shape, len(TOKENIZER)), 0.0)
        for row, ids in enumerate(input_ids.tolist()):
            start, deciding = next(known for text, known in self._texts.items() if tuple(ids[: len(text)]) == text)
            for place, token in enumerate(ids[1:]):
                response = place + 1 - start
                decides = 0 <= response < len(deciding) and deciding[response]
                own = 1.0 if decides else 0.5
                if decides and token in self.words:
                    own = 0.3
                probabilities[row, place, self._filler] = 1 - own
                probabilities[row, place, token] += own
        return SimpleNamespace(logits=probabilities.log())
