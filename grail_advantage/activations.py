"""Getting at a model's activations without leaving a trace: leaves for a backward, logits of chosen columns, modes.

An activation is cut out of the graph and made a leaf, so that a backward stops there and touches no parameter.

Shape suffixes: B rows, S positions, K target tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def leaf_module(model: nn.Module, leaf: str) -> nn.Module:
    """The module whose output is the leaf activation.

    Args:
        model: a Hugging Face causal language model, bare or wrapped (FSDP, PEFT) as a whole and in its blocks.
        leaf: ``embeddings``, ``first``, ``middle`` or ``last``: with ``n`` decoder blocks, hidden states 0, 1, n // 2 and
            n - 1, where 0 is the embeddings and k the output of block k.

    Raises:
        ValueError: the model does not expose its decoder blocks as ``get_decoder().layers``.
    """
    if leaf == "embeddings":
        return model.get_input_embeddings()
    blocks = getattr(model.get_decoder(), "layers", None)
    if blocks is None:
        raise ValueError(
            f"leaf={leaf!r} needs get_decoder().layers, which {type(model).__name__} lacks; use embeddings"
        )
    n = len(blocks)
    k = {"first": 1, "middle": n // 2, "last": n - 1}[leaf]
    return model.get_input_embeddings() if k == 0 else blocks[k - 1]


def accepts_logits_to_keep(model: nn.Module) -> bool:
    """Whether the model's forward takes ``logits_to_keep``, and so can leave out logits that nobody reads."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    return "logits_to_keep" in inspect.signature(type(inner).forward).parameters


@contextmanager
def capture_leaf(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """While open, each forward of ``module`` puts out a detached leaf that requires grad, and appends it to the list.

    The forward hook is gone afterwards, whatever happened inside.
    """
    leaves_BSD: list[torch.Tensor] = []

    def replace_output(_module: nn.Module, _args: tuple, output: torch.Tensor | tuple) -> torch.Tensor | tuple:
        hidden_BSD = output[0] if isinstance(output, tuple) else output
        leaf_BSD = hidden_BSD.detach().requires_grad_()
        leaves_BSD.append(leaf_BSD)
        # FSDP1 cannot hook a leaf that is the input of a block without trainable parameters (LoRA), so it gets a view.
        passed_on_BSD = leaf_BSD.view_as(leaf_BSD)
        return (passed_on_BSD, *output[1:]) if isinstance(output, tuple) else passed_on_BSD

    handle = module.register_forward_hook(replace_output)
    try:
        yield leaves_BSD
    finally:
        handle.remove()


@dataclass(frozen=True)
class HeadOutput:
    """What the output embeddings gave in one forward."""

    kept: torch.Tensor
    """Logits of the kept columns, (B, columns, V), part of the graph."""
    everywhere: torch.Tensor | None
    """Logits of all columns, (B, S, V), outside the graph; ``None`` unless asked for."""


@contextmanager
def keep_logits(head: nn.Module, columns: torch.Tensor, *, with_all: bool = False) -> Iterator[list[HeadOutput]]:
    """While open, each forward of the output embeddings computes the logits of ``columns`` alone, for every row.

    With ``with_all`` it also computes the logits of all columns, without a graph, and appends both to the list. That happens
    inside the forward, where sharding wrappers hold the whole parameters. The hooks are gone afterwards, whatever happened
    inside.

    Args:
        head: the model's output embeddings, (B, S, D) to (B, S, V), bare or wrapped (FSDP, PEFT).
        columns: int64 indices into S.
    """
    outputs: list[HeadOutput] = []
    everywhere: list[torch.Tensor] = []

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        if with_all:
            with torch.no_grad():
                # Not through __call__, which would come back here.
                everywhere.append(head.forward(hidden_BSD.detach(), *others))
        return (hidden_BSD[:, columns], *others)

    def after(_module: nn.Module, _args: tuple, logits: torch.Tensor) -> None:
        if with_all:
            outputs.append(HeadOutput(logits, everywhere.pop()))

    handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture_hidden_states(head: nn.Module) -> Iterator[list[torch.Tensor]]:
    """While open, each forward of the output embeddings appends its input, (B, S, D) and detached, to the list, and computes
    the logits of the first column alone. The hook is gone afterwards, whatever happened inside.

    Args:
        head: the model's output embeddings, bare or wrapped (FSDP, PEFT).
    """
    captured_BSD: list[torch.Tensor] = []

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        captured_BSD.append(hidden_BSD.detach())
        return (hidden_BSD[:, :1], *others)

    handle = head.register_forward_pre_hook(before)
    try:
        yield captured_BSD
    finally:
        handle.remove()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off, gradient checkpointing as configured, gradients on; every module's mode is put back afterwards.

    Transformers checkpoints a block only in training mode, which would also switch dropout on. In Llama, Qwen and their like,
    dropout looks at the mode of the modules *inside* a block, so setting the block's own flag alone gives checkpointing
    without dropout.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for module, _ in modes:
            if isinstance(module, GradientCheckpointingLayer) and _checkpoints_without_reentry(module):
                module.training = True
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _checkpoints_without_reentry(block: GradientCheckpointingLayer) -> bool:
    """Reentrant checkpointing cannot be differentiated with respect to activations; such a block runs without."""
    checkpoint = getattr(block, "_gradient_checkpointing_func", None)
    return block.gradient_checkpointing and getattr(checkpoint, "keywords", {}).get("use_reentrant") is False


def negative_log_likelihood(logits_KV: torch.Tensor, tokens_K: torch.Tensor, temperature: float) -> torch.Tensor:
    """``- sum_k log softmax(logits_k / temperature)[token_k]`` with the softmax in float32.

    Args:
        logits_KV: logits of the target tokens' predictor positions, any floating dtype.
        tokens_K: the target tokens, int64.
        temperature: sampling temperature, greater than 0.

    Returns:
        float32 scalar.
    """
    log_probs_KV = torch.log_softmax(logits_KV.float() / temperature, dim=-1)
    return -log_probs_KV.gather(-1, tokens_K.unsqueeze(-1)).sum()


def saliency(loss: torch.Tensor, leaf_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward from ``loss`` to the leaf alone.

    Returns:
        ``(saliency_BS, gradient_norm_BS)``, float32: ``|| g * h ||_2`` and ``|| g ||_2`` of every position.
    """
    (gradient_BSD,) = torch.autograd.grad(loss, leaf_BSD)
    gradient_BSD = gradient_BSD.float()
    saliency_BS = torch.linalg.vector_norm(gradient_BSD * leaf_BSD.detach().float(), dim=-1)
    return saliency_BS, torch.linalg.vector_norm(gradient_BSD, dim=-1)
