"""A patch whose reason is a fault of verl's: it may go when this fails."""

from __future__ import annotations

import torch

from grail_advantage.verl_ext import patches


def test_saved_shards_no_longer_share_memory_with_the_policy() -> None:
    weight = torch.zeros(2)
    saved = {0: ({"weight": (weight.cpu(), "spec")}, "global")}
    weight += 1
    assert saved[0][0]["weight"][0].tolist() == [1, 1], "a copy by .cpu() is none in host memory"
    patches.copy_saved_shards(saved, 0)
    weight += 1
    assert saved == {0: ({"weight": (saved[0][0]["weight"][0], "spec")}, "global")}
    assert saved[0][0]["weight"][0].tolist() == [1, 1]
