"""A trainer's micro-batches, each padded to a length of its own, on their way to rollouts, and their advantages back."""

import torch

from grail_advantage.data import Rollouts, stacked
from grail_advantage.method import build
from grail_advantage.weigh import weigh


def test_micro_batches_become_rollouts_and_get_their_token_advantages_back():
    """A tool wrote the 7 of the first response; the last response is empty. Masks are narrower than ids: of the last
    positions."""
    ids = [torch.tensor([[5, 6, 7, 9]]), torch.tensor([[5, 8], [6, 9]])]
    masks = [torch.tensor([[1, 0, 1]]), torch.tensor([[1], [0]])]
    # The mask of the first micro-batch is of its last three positions.
    ids_BL, mask_BL = stacked(list(zip(ids, masks, strict=True)))
    assert ids_BL.tolist() == [[5, 6, 7, 9], [5, 8, 0, 0], [6, 9, 0, 0]]
    assert mask_BL.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    advantages = torch.tensor([1.0, -1.0, 2.0])
    rollouts = Rollouts.from_padded(ids_BL, ids_BL != 0, mask_BL, advantages=advantages)
    assert [response.tolist() for response in rollouts.responses] == [[6, 7, 9], [8], []]
    weighed = weigh(rollouts, build("uniform"), host=None)
    # Each in its own layout, the tool's token with 0.
    first, second = weighed.advantages_under(masks)
    assert first.tolist() == [[1.0, 0.0, 1.0]]
    assert second.tolist() == [[-1.0], [0.0]]
