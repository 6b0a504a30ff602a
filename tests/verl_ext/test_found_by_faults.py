"""Behaviour of the verl host that no other test saw when a deliberate fault took it away (``tests/faults.toml``)."""

from __future__ import annotations

import pytest
import torch
from transfer_queue import KVBatchMeta

from grail_advantage import GrailConfig
from grail_advantage.verl_ext import transfer
from grail_advantage.verl_ext.checks import check_config
from tests.composed import compose
from tests.core.tiny_models import char_tokenizer, encode
from tests.verl_ext.test_one_step import Store


def test_no_answer_is_found_in_the_output_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(transfer, "tq", store)
    turns = [("I ask for", 1), (r"\boxed{3}", 0), (r"so it is \boxed{4}", 1), (r"\boxed{5}", 0)]
    for key, row in (("a_0_0", turns), ("a_1_0", turns[1:2])):
        response, mask = (torch.cat(parts) for parts in zip(*map(_turn, row), strict=True))
        store.rows[key] = {"prompts": torch.tensor(encode("Two?")), "responses": response, "loss_mask": mask}
    batch = KVBatchMeta(partition_id="train", keys=list(store.rows), tags=[{}, {}])
    for which in ("first", "last"):
        rollouts = transfer.fetch_rollouts(batch, GrailConfig(span=which), char_tokenizer(), {})
        span, of_tool_alone = rollouts.spans
        assert rollouts.responses[0][span.content_start : span.content_end].tolist() == encode("4")
        assert of_tool_alone is None


def _turn(turn: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = encode(turn[0])
    return torch.tensor(ids), torch.full((len(ids),), turn[1])


@pytest.mark.parametrize("name", ["fp16", "float16"])
def test_every_name_of_half_precision_is_refused(name: str) -> None:
    option = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
    config = compose("grail_trainer", overrides=["actor_rollout_ref.rollout.n=4", f"+{option}={{param_dtype:{name}}}"])
    with pytest.raises(ValueError, match=rf"param_dtype={name} does not .*; use bf16 or fp32"):
        check_config(config)
