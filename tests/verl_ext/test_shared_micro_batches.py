"""What the shared forward hands to verl, and how it takes the time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from grail_advantage.verl_ext.exchange import nested
from grail_advantage.verl_ext.worker import _for_verl


def _data(count: int, **settings: object) -> tu.TensorDict:
    """Responses of one token, which is the response's number, and one more."""
    return tu.get_tensordict(
        {"input_ids": nested([torch.tensor([row, 0]) for row in range(count)])}, non_tensor_dict=settings
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fixed_micro_batches_are_as_many_as_the_rows_need_and_alike(data: st.DataObject) -> None:
    count, size = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    part = _for_verl(_data(count, use_dynamic_bsz=False, micro_batch_size_per_gpu=size), rows)
    micro_batches, _ = prepare_micro_batches(part)
    sizes = [len(micro_batch) for micro_batch in micro_batches]
    assert len(sizes) == -(-len(rows) // size)
    assert set(sizes) == {-(-len(rows) // len(sizes))}
    found = [int(row[0]) for micro_batch in micro_batches for row in micro_batch["input_ids"].unbind()]
    assert found[: len(rows)] == rows
    assert found[len(rows) :] == rows[-1:] * (len(found) - len(rows))
    assert len(found) - len(rows) < len(sizes)  # never a micro-batch of copies
