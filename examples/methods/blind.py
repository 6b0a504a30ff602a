"""A second forward with another prompt: a token counts by how much the question raises its probability."""

from dataclasses import replace

import torch

from grail_advantage import Mapped, register
from grail_advantage.data import RowScores


@register("blind")
class Blind(Mapped):
    reads = frozenset({"old_log_probs"})
    uses = "log_probs"

    def prepare(self, row, tokenizer):
        prompt = row.tokens.new_tensor(tokenizer.encode("Answer:", add_special_tokens=False))
        return replace(row, tokens=torch.cat([prompt, row.tokens[row.start :]]), start=len(prompt))

    def run(self, rows, model):
        log_probs = model.micro_batches(
            rows, lambda micro: micro.response_log_probs(), gradients=False
        )
        return [RowScores(of_row.float()) for of_row in log_probs]

    def scores(self, r, of_pass):
        return (r.columns["old_log_probs"] - of_pass).exp()
