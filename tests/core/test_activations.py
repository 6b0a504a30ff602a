"""The saliency's parts on nets small enough to work out by hand, and whether a model's code changes its logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, GraniteConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from grail_advantage.model import activations
from grail_advantage.model.architecture import architecture_of, has_plain_logits
from tests.core.tiny_models import tiny_model


def hooks(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def test_logits_of_half_precision_are_divided_in_float32() -> None:
    # 0.30078125 is a bfloat16; divided by 0.7 in bfloat16 it would be off by up to 2^-9 relative.
    narrow = activations.negative_log_likelihood(
        torch.tensor([[0.30078125, 0.0]], dtype=torch.bfloat16), torch.tensor([1]), 0.7
    )
    assert narrow.dtype == torch.float32
    assert float(narrow) == pytest.approx(math.log(1 + math.exp(0.30078125 / 0.7)), rel=1e-6)


@pytest.mark.parametrize("together", [1, 1024])
def test_log_probs_and_entropy_by_hand(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is ruled out adds nothing to the entropy, and a broken response stays broken."""
    monkeypatch.setattr(activations, "POSITIONS_TOGETHER", together)
    logits = torch.tensor([[0.0, math.log(3), -math.inf], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    tokens = torch.tensor([1, 2, 0])
    log_probs, entropies = activations.log_probs_and_entropy(logits, tokens, 1.0)
    quarters = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert log_probs[:2].tolist() == pytest.approx([math.log(0.75), -math.log(3)], rel=1e-6)
    assert entropies[:2].tolist() == pytest.approx([quarters, math.log(3)], rel=1e-6)
    assert log_probs[2].isnan() and entropies[2].isnan()
    squared, none = activations.log_probs_and_entropy(logits[:1], tokens[:1], 0.5, entropy=False)
    assert squared.tolist() == pytest.approx([math.log(0.9)], rel=1e-6) and none is None


def test_capture_replaces_the_first_of_a_tuple_by_a_leaf() -> None:
    module = nn.LSTM(1, 1)
    with activations.capture_leaf(module) as leaves:
        hidden, rest = module(torch.tensor([[3.0]]))
        module(torch.tensor([[4.0]]))
    assert len(rest) == len(leaves) == 2 and torch.equal(hidden, leaves[0]) and not torch.equal(*leaves)
    (hidden * 5).sum().backward()
    assert leaves[0].grad.item() == 5.0 and hooks(module) == 0
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
    with activations.evaluation_mode(model, checkpoint_blocks=not configured):
        (gradient,) = torch.autograd.grad(model(leaf * 1).sum(), leaf)
    assert block.calls == (False, False)  # once more in the backward
    torch.testing.assert_close(gradient, 3 * torch.cos(3 * leaf.detach()))
    assert block.training and block.gradient_checkpointing is configured
    assert "_gradient_checkpointing_func" not in vars(block)


def test_a_forward_that_goes_past_a_hook_is_said() -> None:
    model, other = tiny_model(layers=1), nn.Linear(16, 97)
    for reader in (activations.capture_leaf, activations.capture_hidden_states):
        with pytest.raises(ValueError, match="Linear"), reader(other):
            model(input_ids=torch.zeros((1, 3), dtype=torch.int64))
        assert hooks(other) == 0


class Largest(TorchDispatchMode):
    """The most elements that a tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


def test_no_tensor_grows_with_target_and_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "CHUNK_POSITIONS", 8)
    model = tiny_model(layers=1, vocab_size=50_000, tied=True)
    tokens_2S = torch.arange(120).reshape(2, 60)
    column_K, row_K = torch.arange(59), torch.zeros(59, dtype=torch.int64)
    targets = activations.Targets(tokens_2S[row_K, column_K + 1], row_K, column_K)
    with Largest() as largest, activations.capture_leaf(model.model.embed_tokens) as leaves:
        with activations.sum_log_probs(model.lm_head, targets, 1.0):
            total = activations.read_sum(model(input_ids=tokens_2S, use_cache=False).logits)
        activations.saliency(total, leaves[0])
    assert largest.elements <= max(8 * 50_000, model.lm_head.weight.numel())


def test_a_model_that_changes_the_sum_is_refused() -> None:
    logits = torch.tensor([[[-3.0, activations.MARK]]])
    assert activations.read_sum(logits) == -3
    with pytest.raises(ValueError, match="logits"):
        activations.read_sum(0.5 * logits)


KNOWN = [
    (GraniteConfig(num_hidden_layers=1), True),
    (GraniteConfig(num_hidden_layers=1, logits_scaling=8.0), False),
    (Gemma2Config(num_hidden_layers=1), False),  # capped by a tanh
    (Gemma2Config(num_hidden_layers=1, final_logit_softcapping=None), True),
]


def test_scaled_and_capped_logits_are_found_without_weights_and_without_a_run() -> None:
    for config, plain in KNOWN:
        architecture = architecture_of(config)
        assert architecture.plain_logits is plain, config
        assert {parameter.device.type for parameter in architecture.copy.parameters()} == {"meta"}
    model = tiny_model(layers=1)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    model.config._attn_implementation = "flash_attention_2"  # for a GPU, and not installed wherever this is asked
    assert has_plain_logits(nn.Sequential(model))
    assert model.config._attn_implementation == "flash_attention_2"
