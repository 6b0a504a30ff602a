from typing import Literal

import torch

from grail_advantage import Mapped, Weights, option, register, register_map
from grail_advantage.maps import Positive


@register_map()
def softmax(x, m, sharpness: Positive = 1.0):
    """Proportional to exp(x / sharpness), and 1 on average."""
    shares = torch.softmax(torch.where(m, x / sharpness, -torch.inf), dim=-1)
    return Weights(shares * m.sum(dim=-1, keepdim=True))


@register("confident_blame")
class ConfidentBlame(Mapped):
    reads = frozenset({"old_log_probs"})
    gate: Literal["wrong", "correct", "all"] = "wrong"
    reshaper: str = option("softmax", "map from scores to weights, by its name")

    def scores(self, r, of_pass):
        return r.columns["old_log_probs"].exp()
