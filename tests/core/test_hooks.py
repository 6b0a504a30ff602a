"""What is read of a model, on nets small enough to work out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from grail_advantage.model import hooks
from tests.core.tiny_models import tiny_model


def count_hooks(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def test_logits_of_half_precision_are_divided_in_float32() -> None:
    # 0.30078125 is a bfloat16; divided by 0.7 in bfloat16 it would be off by up to 2^-9 relative.
    narrow = hooks.log_probs(torch.tensor([[0.30078125, 0.0]], dtype=torch.bfloat16), torch.tensor([1]), 0.7)
    assert narrow.dtype == torch.float32
    assert float(narrow) == pytest.approx(-math.log(1 + math.exp(0.30078125 / 0.7)), rel=1e-6)


@pytest.mark.parametrize("together", [1, 1024])
def test_log_probs_and_entropies_by_hand(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is ruled out adds nothing to the entropy, and a broken response stays broken."""
    monkeypatch.setattr(hooks, "TOGETHER", together)
    logits = torch.tensor([[0.0, math.log(3), -math.inf], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    tokens = torch.tensor([1, 2, 0])
    log_probs, entropies = hooks.log_probs(logits, tokens, 1.0), hooks.entropies(logits, 1.0)
    quarters = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert log_probs[:2].tolist() == pytest.approx([math.log(0.75), -math.log(3)], rel=1e-6)
    assert entropies[:2].tolist() == pytest.approx([quarters, math.log(3)], rel=1e-6)
    assert log_probs[2].isnan() and entropies[2].isnan()
    assert hooks.log_probs(logits[:1], tokens[:1], 0.5).tolist() == pytest.approx([math.log(0.9)], rel=1e-6)


def test_capture_replaces_the_first_of_a_tuple_by_a_leaf() -> None:
    module = nn.LSTM(1, 1)
    with hooks.capture_leaf(module) as leaves:
        hidden, rest = module(torch.tensor([[3.0]]))
        module(torch.tensor([[4.0]]))
    assert len(rest) == len(leaves) == 2 and torch.equal(hidden, leaves[0]) and not torch.equal(*leaves)
    (hidden * 5).sum().backward()
    assert leaves[0].grad.item() == 5.0 and count_hooks(module) == 0
    assert all(parameter.grad is None for parameter in module.parameters())


class DropsOutByItself(GradientCheckpointingLayer):
    """A block whose dropout looks at the block's own mode."""

    calls = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += (self.training,)
        return torch.sin(3 * nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("configured", [False, True])
def test_blocks_are_checkpointed_in_evaluation_mode_inside(configured: bool) -> None:
    block = DropsOutByItself().train()
    block.gradient_checkpointing = configured
    leaf, model = torch.arange(8.0).requires_grad_(), nn.Sequential(block)
    with hooks.evaluation_mode(model, checkpoint_blocks=not configured):
        (gradient,) = torch.autograd.grad(model(leaf * 1).sum(), leaf)
    assert block.calls == (False, False)  # once more in the backward
    torch.testing.assert_close(gradient, 3 * torch.cos(3 * leaf.detach()))
    assert block.training and block.gradient_checkpointing is configured
    assert "_gradient_checkpointing_func" not in vars(block)


def test_a_forward_that_goes_past_a_hook_is_said() -> None:
    model, other = tiny_model(layers=1), nn.Linear(16, 97)
    ids, head = torch.zeros((1, 3), dtype=torch.int64), SimpleNamespace(get_output_embeddings=lambda: other)
    for reader in (hooks.capture_leaf(other), hooks.capture_hidden_states(head)):
        with pytest.raises(ValueError, match="Linear"), reader:
            model(input_ids=ids)
        assert count_hooks(other) == 0
