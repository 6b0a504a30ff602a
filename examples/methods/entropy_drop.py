"""A shift: a token counts by how much the entropy falls after it."""

import torch

from grail_advantage import Mapped, register


@register("entropy_drop")
class EntropyDrop(Mapped):
    reads = frozenset({"entropy"})

    def scores(self, r, of_pass):
        entropy = torch.nn.functional.pad(r.columns["entropy"], (0, 1), value=torch.nan)
        drop = entropy[:, :-1] - entropy[:, 1:]
        return drop.nan_to_num(0.0).exp()  # a turn's last token has no next one
