"""Activations of a model, read without a lasting change to it. An activation is cut out of the graph and made a leaf,
so that a backward stops there and touches no parameter. No hook stays, whatever happens inside.

Shape suffixes: B rows, S positions, K target tokens, D hidden, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD_TOKENS = 4096  # most of a forward, padding counted, where nobody says
TOGETHER = 1024  # positions whose distribution over the vocabulary is held in float32 at a time
REMEDY = "pass a causal language model, such as AutoModelForCausalLM loads"


def has_adapter(model: Module) -> bool:
    """Whether it is a model of PEFT's whose adapter can be switched off."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


@contextmanager
def capture_leaf(module: Module) -> Iterator[list[Tensor]]:
    """While open, each forward of ``module`` puts out a detached leaf (B, S, D) that requires grad, and appends it to
    the list. ValueError: the forward does not call the module."""
    leaves_BSD: list[Tensor] = []

    def replace_output(_module: Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        hidden_BSD = output[0] if isinstance(output, tuple) else output
        leaf_BSD = hidden_BSD.detach().requires_grad_()
        leaves_BSD.append(leaf_BSD)
        # FSDP1 cannot hook a leaf that is the input of a block without trainable parameters (LoRA), so it gets a view.
        passed_on_BSD = leaf_BSD.view_as(leaf_BSD)
        return (passed_on_BSD, *output[1:]) if isinstance(output, tuple) else passed_on_BSD

    with _hooked(module.register_forward_hook(replace_output), leaves_BSD, module, "leaf module"):
        yield leaves_BSD


@contextmanager
def frozen_parameters(model: Module) -> Iterator[None]:
    """While open, no parameter asks for a gradient, so that a forward keeps nothing for theirs: a linear layer keeps its
    input for its weight's gradient alone. Parameters of other classes, such as those that FSDP shards, stay as they
    are: its hooks hang on their gradients."""
    trained = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and type(parameter) is Parameter and parameter.is_leaf
    ]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def at_head(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, each forward of the model's output embeddings computes the logits of ``change(hidden)``, of the hidden
    states (B, S, D) those that are needed. ValueError: there are no output embeddings, or the forward calls none."""
    head = model.get_output_embeddings()
    calls: list[None] = []
    if head is None:
        raise ValueError(f"model ({type(model).__name__}) gives no logits, {REMEDY}")

    def replace_input(_module: Module, args: tuple) -> tuple:
        calls.append(None)
        return (change(args[0]), *args[1:])

    # First among the hooks: those that gather parameters for the backward must see the tensors that take part in it.
    handle = head.register_forward_pre_hook(replace_input, prepend=True)
    with _hooked(handle, calls, head, "output embeddings"):
        yield


@contextmanager
def _hooked(
    handle: RemovableHandle, calls: Sequence[object], module: Module, name: str
) -> Iterator[None]:
    """A forward that went past a hook would give wrong values, or none."""
    with handle:
        yield
        if not calls:
            raise ValueError(
                f"the model's forward did not call its {name} ({type(module).__name__}), so this method cannot read it; "
                "switch off what replaces it (fused kernels, a patched class), or use a method without a pass"
            )


@contextmanager
def evaluation_mode(model: Module, *, checkpoint_blocks: bool = False) -> Iterator[None]:
    """Dropout off, gradient checkpointing as configured, gradients on; every module's mode is put back afterwards. Blocks
    and FSDP1 units work as :mod:`grail_advantage.model.patches` says. ``checkpoint_blocks`` is for training that saves
    memory in another way: they are checkpointed whatever is configured."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from grail_advantage.model.patches import (
        checkpointing_in_evaluation,
        refuse_waiting_hooks,
        release_waiting_hooks,
        reset_sharding,
        resharding,
    )

    refuse_waiting_hooks(model)
    modes = {module: module.training for module in model.modules()}
    blocks = [
        module
        for module in modes
        if isinstance(module, GradientCheckpointingLayer)
        and (checkpoint_blocks or module.gradient_checkpointing)
    ]
    try:
        model.eval()
        with (
            checkpointing_in_evaluation(blocks),
            resharding(model),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    except BaseException:
        reset_sharding(model)
        raise
    finally:
        release_waiting_hooks(model)
        for module, training in modes.items():
            module.training = training


def log_probs(logits_KV: Tensor, tokens_K: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token at the sampling temperature, above 0, from the logits of its predictor position, of any
    floating dtype; (K,), computed in float32."""
    parts = zip(_distributions(logits_KV, temperature), tokens_K.split(TOGETHER), strict=True)
    return torch.cat([log_KV.gather(-1, ids_K[:, None])[:, 0] for log_KV, ids_K in parts])


def entropies(logits_KV: Tensor, temperature: float) -> Tensor:
    """Entropy, in nats, of the distribution that each token is drawn from, as :func:`log_probs`."""
    sums = []
    for log_KV in _distributions(logits_KV, temperature):
        # A word that is ruled out (probability 0, logit -inf) adds nothing; NaN stays.
        terms_KV = torch.where(log_KV == -torch.inf, 0, log_KV.exp() * log_KV)
        sums.append(-terms_KV.sum(-1))
    return torch.cat(sums)


def _distributions(logits_KV: Tensor, temperature: float) -> Iterator[Tensor]:
    for part_KV in logits_KV.split(TOGETHER):
        # Float32 before the division, which half precision would round.
        yield torch.log_softmax(part_KV.float() / temperature, dim=-1)


def gradient_at(loss: Tensor, leaf_BSD: Tensor) -> Tensor:
    """Gradient of ``loss`` at the leaf alone, float32 (B, S, D). ValueError: a layer between them, such as a quantised
    one, passes no gradient."""
    gradient = None
    # A quantised layer may cut the graph off.
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, leaf_BSD, allow_unused=True)
    if gradient is None:
        raise ValueError(
            "model has layers that pass no gradient, as torch's int8 linears; load it without quantisation, or take a "
            "method without a backward, such as surprisal or entropy"
        )
    return gradient.float()
