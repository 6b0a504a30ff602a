"""The saliency's parts: leaf capture, evaluation mode, target loss and score, on nets small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from grail_advantage.model import activations
from grail_advantage.model.activations import (
    Targets,
    capture_hidden_states,
    capture_leaf,
    evaluation_mode,
    keep_logits,
    log_probs_and_entropy,
    negative_log_likelihood,
    read_sum,
    saliency,
    sum_log_probs,
)
from tests.core.tiny_models import tiny_model


class Doubling(nn.Module):
    """Puts out `2 * w * x`, alone or as the first of a tuple."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.as_tuple = as_tuple

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, str]:
        doubled = 2 * self.w * x
        return (doubled, "rest") if self.as_tuple else doubled


def hooks(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def test_saliency_by_hand() -> None:
    # L = sum of c * h, so g = c: products (3, 8) and (0, -1), norms sqrt(73) and 1; |c| is sqrt(5) and 1.
    h = torch.tensor([[[3.0, 4.0], [7.0, 1.0]]], requires_grad=True)
    c = torch.tensor([[[1.0, 2.0], [0.0, -1.0]]])
    score, norm = saliency((c * h).sum(), h)
    torch.testing.assert_close(score, torch.tensor([[math.sqrt(73), 1.0]]))
    torch.testing.assert_close(norm, torch.tensor([[math.sqrt(5), 1.0]]))
    assert not score.requires_grad
    assert h.grad is None


def test_negative_log_likelihood_by_hand() -> None:
    # Logits 0 and log 3: probabilities 1/4 and 3/4; at temperature 0.5 the odds are squared: 1/10 and 9/10.
    logits = torch.tensor([[0.0, math.log(3)]])
    for temperature, expected in ((1.0, math.log(4 / 3)), (0.5, math.log(10 / 9))):
        assert float(negative_log_likelihood(logits, torch.tensor([1]), temperature)) == pytest.approx(
            expected, rel=1e-6
        )
    three = torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0], [0.0, 0.0]])
    got = negative_log_likelihood(three, torch.tensor([0, 0, 1]), 1.0)
    assert float(got) == pytest.approx(math.log(4) + math.log(8 / 7) + math.log(2), rel=1e-6)
    # 0.30078125 is a bfloat16; divided by 0.7 in bfloat16 it would be off by up to 2^-9 relative.
    narrow = negative_log_likelihood(torch.tensor([[0.30078125, 0.0]], dtype=torch.bfloat16), torch.tensor([1]), 0.7)
    assert narrow.dtype == torch.float32
    assert float(narrow) == pytest.approx(math.log(1 + math.exp(0.30078125 / 0.7)), rel=1e-6)


@pytest.mark.parametrize("together", [1, 1024])
def test_log_probs_and_entropy_by_hand(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is ruled out adds nothing to the entropy, and a broken row stays broken."""
    monkeypatch.setattr(activations, "POSITIONS_TOGETHER", together)
    logits = torch.tensor([[0.0, math.log(3), -math.inf], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    tokens = torch.tensor([1, 2, 0])
    log_probs, entropies = log_probs_and_entropy(logits, tokens, 1.0)
    quarters = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert log_probs[:2].tolist() == pytest.approx([math.log(0.75), -math.log(3)], rel=1e-6)
    assert entropies[:2].tolist() == pytest.approx([quarters, math.log(3)], rel=1e-6)
    assert log_probs[2].isnan() and entropies[2].isnan()
    squared, none = log_probs_and_entropy(logits[:1], tokens[:1], 0.5, entropy=False)
    assert squared.tolist() == pytest.approx([math.log(0.9)], rel=1e-6) and none is None


@pytest.mark.parametrize("as_tuple", [True, False])
def test_capture_replaces_the_output_by_a_leaf(as_tuple: bool) -> None:
    module = Doubling(as_tuple)
    x = torch.tensor([3.0])
    with capture_leaf(module) as leaves:
        output = module(x)
        module(x + 1)
    hidden = output[0] if as_tuple else output
    assert not as_tuple or output[1:] == ("rest",)
    assert torch.equal(hidden, leaves[0])
    assert [leaf.item() for leaf in leaves] == [6.0, 8.0]
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)
    (hidden * 5).sum().backward()
    assert module.w.grad is None
    assert leaves[0].grad.item() == 5.0
    assert hooks(module) == 0
    assert (module(x)[0] if as_tuple else module(x)).grad_fn is not None


class DropsOutByItself(GradientCheckpointingLayer):
    """A block whose dropout looks at the block's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))
        self.calls: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(self.training)
        return torch.sin(self.w * nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("reentrant", [False, True])
def test_evaluation_mode_keeps_checkpointing_of_blocks_without_their_dropout(reentrant: bool) -> None:
    """Whichever way the blocks are checkpointed in training."""
    model = tiny_model(layers=2, attention_dropout=0.5).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    own = [dict(vars(block)) for block in model.model.layers]
    with evaluation_mode(model):
        on = [module for module in model.modules() if module.training]
        assert on == list(model.model.layers)
    assert [dict(vars(block)) for block in model.model.layers] == own
    model.gradient_checkpointing_disable()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    with evaluation_mode(model.eval()):
        pass
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("configured", [False, True])
def test_blocks_are_checkpointed_in_evaluation_mode_inside(configured: bool) -> None:
    block = DropsOutByItself().train()
    block.gradient_checkpointing = configured
    model = nn.Sequential(block)
    leaf = torch.arange(8.0).requires_grad_()
    with evaluation_mode(model, checkpoint_blocks=not configured):
        (gradient,) = torch.autograd.grad(model(leaf * 1).sum(), leaf)
    assert block.calls == [False, False]  # once more in the backward
    torch.testing.assert_close(gradient, 3 * torch.cos(3 * leaf.detach()))
    assert block.training and block.gradient_checkpointing is configured
    assert "_gradient_checkpointing_func" not in vars(block)


@pytest.mark.parametrize("reader", [capture_leaf, capture_hidden_states])
def test_a_forward_that_goes_past_a_hook_is_said(reader: Any) -> None:
    model, other = tiny_model(layers=1), nn.Linear(16, 97)
    with pytest.raises(ValueError, match=r"forward did not call its .* \(Linear\)"), reader(other):
        model(input_ids=torch.zeros((1, 3), dtype=torch.int64))
    assert hooks(other) == 0
    with pytest.raises(ValueError, match="output embeddings"), keep_logits(other, torch.tensor([0])):
        model(input_ids=torch.zeros((1, 3), dtype=torch.int64))


class Largest(TorchDispatchMode):
    """The most elements that a tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def _long_targets(count: int) -> tuple[torch.Tensor, Targets]:
    generator = torch.Generator().manual_seed(0)
    tokens_2S = torch.randint(0, 97, (2, count), generator=generator)
    column_K = torch.cat([torch.arange(count - 1), torch.arange(3, 9)])
    row_K = torch.cat([torch.zeros(count - 1, dtype=torch.int64), torch.ones(6, dtype=torch.int64)])
    return tokens_2S, Targets(tokens_2S[row_K, column_K + 1], row_K, column_K)


@pytest.mark.parametrize(("chunk", "tied"), [(7, True), (59, False), (1000, False)])
def test_sum_of_log_probs_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int, tied: bool) -> None:
    monkeypatch.setattr(activations, "CHUNK_POSITIONS", chunk)
    model = tiny_model(tied=tied, layers=2)
    tokens_2S, targets = _long_targets(55)
    assert len(targets.tokens_K) == 60
    with capture_leaf(model.model.embed_tokens) as leaves:
        logits_2SV = model(input_ids=tokens_2S, use_cache=False).logits
    of_all = negative_log_likelihood(logits_2SV[targets.batch_row_K, targets.column_K], targets.tokens_K, 0.7)
    expected, _ = saliency(of_all, leaves[0])

    with (
        capture_leaf(model.model.embed_tokens) as leaves,
        sum_log_probs(model.lm_head, targets, 0.7, with_all=True) as all_,
    ):
        total = read_sum(model(input_ids=tokens_2S, use_cache=False).logits)
    assert total.item() == pytest.approx(-of_all.item(), rel=1e-6)
    torch.testing.assert_close(saliency(-total, leaves[0])[0], expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert torch.equal(all_[0], logits_2SV)
    assert not all_[0].requires_grad
    assert hooks(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_tensor_grows_with_target_and_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "CHUNK_POSITIONS", 8)
    model = tiny_model(layers=1, vocab_size=50_000, tied=True)
    tokens_2S, targets = _long_targets(60)
    with Largest() as largest, capture_leaf(model.model.embed_tokens) as leaves:
        with sum_log_probs(model.lm_head, targets, 1.0):
            total = read_sum(model(input_ids=tokens_2S, use_cache=False).logits)
        saliency(total, leaves[0])
    assert largest.elements <= max(8 * 50_000, model.lm_head.weight.numel())


def test_a_model_that_changes_the_sum_is_refused() -> None:
    logits = torch.tensor([[[-3.0, activations.MARK]]])
    assert read_sum(logits) == -3
    with pytest.raises(ValueError, match="changes its logits"):
        read_sum(0.5 * logits)
