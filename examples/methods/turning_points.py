"""A pass of one's own: a token matters where the hidden state turns."""

import torch

from grail_advantage import Mapped, register
from grail_advantage.data import RowScores


@register("turning_points")
class TurningPoints(Mapped):
    uses = "hidden_states"

    def run(self, rows, model):
        hidden = model.micro_batches(rows, lambda micro: micro.hidden_states(), gradients=False)
        return [RowScores(self.turns(states.float())) for states in hidden]

    def turns(self, states):
        return 1 - torch.cosine_similarity(states, torch.cat([states[:1], states[:-1]]), dim=-1)
