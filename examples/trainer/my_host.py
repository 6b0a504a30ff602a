"""Token advantages in a trainer of one's own."""

from dataclasses import replace

import torch
from torch.nn.utils.rnn import pad_sequence

from grail_advantage import Rollouts
from grail_advantage.method import build
from grail_advantage.model.hugging_face import HuggingFaceModel
from grail_advantage.weigh import weigh


class MyHost:
    def __init__(self, model, tokenizer, prompts, responses, advantages, columns, step):
        mask = pad_sequence([torch.ones(len(response)) for response in responses], batch_first=True).bool()
        self.known = Rollouts(
            prompts=prompts, responses=responses, mask=mask, advantages=advantages, tokenizer=tokenizer
        )
        self.model = HuggingFaceModel(model, tokenizer, temperature=1.0, device=model.device, group=None, step=step)
        self.model.check_logits(responses)
        self.of_policy = columns

    def rollouts(self):
        return self.known

    def columns(self, names, selected):  # old_log_probs, entropy: (B, T) each, of the policy that wrote the responses
        return {name: self.of_policy[name] for name in names}

    def scores(self, method, rows):  # one RowScores a row; with a sharded model on every rank, also without rows
        return method.run([replace(row, tokens=row.tokens.to(self.model.device)) for row in rows], self.model)


def token_advantages(host, name, **options):  # (B, T): what your loss takes in place of one advantage a response
    return weigh(host, build(name, options), answers=None).advantages
