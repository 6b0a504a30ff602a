"""The saliency's parts: leaf capture, evaluation mode, target loss and score, on nets small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from grail_advantage.activations import (
    accepts_logits_to_keep,
    capture_leaf,
    evaluation_mode,
    leaf_module,
    negative_log_likelihood,
    saliency,
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


class LogitsOnly(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_saliency_is_float32(dtype: torch.dtype) -> None:
    # 0.01 squared and summed over 4096 dimensions would not survive in bfloat16's eight bits.
    h = torch.full((1, 1, 4096), 0.5, dtype=dtype, requires_grad=True)
    score, norm = saliency((h * 0.25).float().sum(), h)
    assert score.dtype == norm.dtype == torch.float32
    assert float(score) == pytest.approx(64 * 0.125, rel=1e-6)
    assert float(norm) == pytest.approx(64 * 0.25, rel=1e-6)


def test_saliency_leaves_other_gradients_alone() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    h = torch.ones(1, 1, 3, requires_grad=True)
    saliency((w * h).sum(), h)
    assert w.grad is None


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, math.log(4 / 3)), (0.5, math.log(10 / 9))])
def test_negative_log_likelihood_by_hand(temperature: float, expected: float) -> None:
    # Logits 0 and log 3: probabilities 1/4 and 3/4; at temperature 0.5 the odds are squared: 1/10 and 9/10.
    logits = torch.tensor([[0.0, math.log(3)]])
    assert float(negative_log_likelihood(logits, torch.tensor([1]), temperature)) == pytest.approx(expected, rel=1e-6)


def test_negative_log_likelihood_sums_over_targets() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0], [0.0, 0.0]])
    got = negative_log_likelihood(logits, torch.tensor([0, 0, 1]), 1.0)
    assert float(got) == pytest.approx(math.log(4) + math.log(8 / 7) + math.log(2), rel=1e-6)


def test_negative_log_likelihood_is_float32_before_the_division() -> None:
    # 0.30078125 is a bfloat16; divided by 0.7 in bfloat16 it would be off by up to 2^-9 relative.
    logits = torch.tensor([[0.30078125, 0.0]], dtype=torch.bfloat16)
    got = negative_log_likelihood(logits, torch.tensor([1]), 0.7)
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(math.log(1 + math.exp(0.30078125 / 0.7)), rel=1e-6)


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


def test_capture_leaves_no_hook_after_an_exception() -> None:
    module = Doubling(False)
    with pytest.raises(RuntimeError, match="broken"), capture_leaf(module) as leaves:
        module(torch.tensor([1.0]))
        raise RuntimeError("broken")
    assert len(leaves) == 1
    assert hooks(module) == 0


def test_capture_keeps_foreign_hooks() -> None:
    module = Doubling(False)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    with capture_leaf(module):
        module(torch.tensor([1.0]))
    module(torch.tensor([1.0]))
    assert len(calls) == 2
    assert hooks(module) == 1


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        # hidden state k of first, middle and last; 0 is the embeddings
        (1, {"first": 1, "middle": 0, "last": 0}),
        (2, {"first": 1, "middle": 1, "last": 1}),
        (3, {"first": 1, "middle": 1, "last": 2}),
        (4, {"first": 1, "middle": 2, "last": 3}),
        (5, {"first": 1, "middle": 2, "last": 4}),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_leaf_module(family: str, layers: int, expected: dict[str, int]) -> None:
    model = tiny_model(family, layers=layers)
    states = [model.model.embed_tokens, *model.model.layers]
    assert leaf_module(model, "embeddings") is states[0]
    for leaf, k in expected.items():
        assert leaf_module(model, leaf) is states[k], leaf


def test_models_without_a_list_of_blocks_are_refused_but_for_the_embeddings() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    assert leaf_module(model, "embeddings") is model.transformer.wte
    with pytest.raises(ValueError, match=r"leaf='last'.*GPT2LMHeadModel.*use embeddings"):
        leaf_module(model, "last")


def test_logits_to_keep_is_found_through_a_wrapper() -> None:
    model = tiny_model(layers=1)
    assert accepts_logits_to_keep(model)
    assert accepts_logits_to_keep(nn.Sequential(model))
    assert not accepts_logits_to_keep(LogitsOnly())


def training_modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("start", ["eval", "train", "mixed"])
@pytest.mark.parametrize("raises", [False, True])
def test_evaluation_mode_puts_every_mode_back(start: str, raises: bool) -> None:
    model = tiny_model(layers=2).train(start != "eval")
    if start == "mixed":
        model.model.layers[0].eval()
        model.model.layers[0].mlp.train()
        model.training = False
    before = training_modes(model)
    assert set(before.values()) == {"eval": {False}, "train": {True}, "mixed": {False, True}}[start]
    try:
        with evaluation_mode(model):
            assert not any(training_modes(model).values())
            if raises:
                raise KeyError("broken")
    except KeyError:
        assert raises
    assert training_modes(model) == before


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_mode_turns_gradients_on_and_back(context: type) -> None:
    model = tiny_model(layers=1)
    with context():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with evaluation_mode(model):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_evaluation_mode_keeps_checkpointing_of_blocks_without_their_dropout() -> None:
    model = tiny_model(layers=2, attention_dropout=0.5).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with evaluation_mode(model):
        on = [module for module in model.modules() if module.training]
        assert on == list(model.model.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with evaluation_mode(model):
        assert not any(training_modes(model).values())
    model.gradient_checkpointing_disable()
    with evaluation_mode(model):
        assert not any(training_modes(model).values())
