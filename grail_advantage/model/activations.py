"""Activations of a model, read without a lasting change to it: leaves for a backward, logits of chosen columns, modes.

An activation is cut out of the graph and made a leaf, so that a backward stops there and touches no parameter.

Under FSDP the output embeddings' parameters are whole only inside their own forward, and a backward only works from the
model's own output. So :func:`sum_log_probs` replaces that forward: it sums the targets' log-probabilities in chunks and returns
``[sum, MARK]`` as if they were two logits. :func:`read_sum` takes the sum, and checks that :data:`MARK`, 64.0, came through
unchanged: a model that scales or caps its logits would have changed it.

Shape suffixes: B rows, S positions, K target tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)

CHUNK_POSITIONS = 512
"""Most positions whose logits are held with the tensors of their gradient, about 16 bytes for each and each entry of the
vocabulary: 1.2 GB with 151,936 entries."""
FORWARD_TOKENS = 4096
"""Most tokens of a forward, padding counted, where nobody says."""
POSITIONS_TOGETHER = 1024
"""Positions whose distribution over the vocabulary is held in float32 at a time."""
MARK = 64.0
"""The second of two values that leave the model in place of logits, after a sum of log-probabilities."""


def units_of(model: nn.Module) -> list[nn.Module]:
    """The FSDP1 units inside a model."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside an FSDP1 unit, whose forward runs with the unit's parameters whole; any other module itself."""
    return module.module if module in units_of(module) else module


def leaf_module(model: nn.Module, leaf: str) -> nn.Module:
    """The module whose output is the activation.

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


def keeps_keys_and_values(model: nn.Module) -> bool:
    """Whether a model's cache holds keys and values, which a forward may go on from, and no state."""
    return not getattr(inner_model(model), "_is_stateful", False)


def accepts_logits_to_keep(model: nn.Module) -> bool:
    """Whether the model's forward takes ``logits_to_keep``, and so can leave out logits that nobody reads."""
    return "logits_to_keep" in inspect.signature(type(inner_model(model)).forward).parameters


def inner_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside wrappers."""
    from transformers import PreTrainedModel  # not above: naming the methods would import transformers' model code

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


@contextmanager
def capture_leaf(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """While open, each forward of ``module`` puts out a detached leaf that requires grad, and appends it to the list.

    The forward hook is gone afterwards, whatever happened inside.

    Raises:
        ValueError: the forward does not call the module.
    """
    leaves_BSD: list[torch.Tensor] = []

    def replace_output(_module: nn.Module, _args: tuple, output: torch.Tensor | tuple) -> torch.Tensor | tuple:
        hidden_BSD = output[0] if isinstance(output, tuple) else output
        leaf_BSD = hidden_BSD.detach().requires_grad_()
        leaves_BSD.append(leaf_BSD)
        # FSDP1 cannot hook a leaf that is the input of a block without trainable parameters (LoRA), so it gets a view.
        passed_on_BSD = leaf_BSD.view_as(leaf_BSD)
        return (passed_on_BSD, *output[1:]) if isinstance(output, tuple) else passed_on_BSD

    with _hooked(leaves_BSD, module, "leaf module", module.register_forward_hook(replace_output)):
        yield leaves_BSD


@contextmanager
def _hooked(calls: Sequence[object], module: nn.Module, what: str, *handles: RemovableHandle) -> Iterator[None]:
    """Remove the hooks at the end. A forward that went past them would give wrong values, or none."""
    try:
        yield
        if not calls:
            raise ValueError(
                f"the model's forward did not call its {what} ({type(module).__name__}), so this method cannot read it; a "
                "replaced forward (fused kernels, a patched model class) does that: switch it off, or use a method without a "
                "pass"
            )
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class HeadOutput:
    """Results of the output embeddings in one forward."""

    kept: torch.Tensor
    """Logits of the kept columns, (B, columns, V), part of the graph."""
    everywhere: torch.Tensor | None
    """Logits of all columns, (B, S, V), outside the graph; ``None`` unless asked for."""


@contextmanager
def keep_logits(head: nn.Module, columns: torch.Tensor, *, with_all: bool = False) -> Iterator[list[HeadOutput]]:
    """While open, each forward of the output embeddings computes the logits of ``columns`` alone, for every row.

    With ``with_all`` it also computes the logits of all columns, without a graph: inside the forward, where sharding wrappers
    hold the whole parameters. The hooks are gone afterwards, whatever happened inside.

    Args:
        head: the model's output embeddings, (B, S, D) to (B, S, V), bare or wrapped (FSDP, PEFT).
        columns: int64 indices into S.

    Raises:
        ValueError: the forward does not call the module.
    """
    outputs: list[HeadOutput] = []
    everywhere: list[torch.Tensor | None] = []

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        everywhere.append(_all_logits(head, hidden_BSD, *others) if with_all else None)
        return (hidden_BSD[:, columns], *others)

    def after(_module: nn.Module, _args: tuple, logits: torch.Tensor) -> None:
        outputs.append(HeadOutput(logits, everywhere.pop()))

    handles = head.register_forward_pre_hook(before), head.register_forward_hook(after)
    with _hooked(outputs, head, "output embeddings", *handles):
        yield outputs


def _all_logits(head: nn.Module, hidden_BSD: torch.Tensor, *others: Any) -> torch.Tensor:
    """Outside the graph."""
    with torch.no_grad():
        # Not through __call__, which would come back to the hook that asks.
        return head.forward(hidden_BSD.detach(), *others)


@dataclass(frozen=True)
class Targets:
    """Target tokens, and where in a micro-batch their predictors are; int64, (K,) each."""

    tokens_K: torch.Tensor
    batch_row_K: torch.Tensor
    column_K: torch.Tensor


@contextmanager
def keep_positions(head: nn.Module, positions: Targets) -> Iterator[None]:
    """While open, each forward of the output embeddings computes the logits (1, K, V) of these positions alone. The hook is
    gone afterwards, whatever happened inside.

    Args:
        head: the model's output embeddings, (B, S, D) to (B, S, V), bare or wrapped (FSDP, PEFT).
        positions: of the model's forward.

    Raises:
        ValueError: the forward does not call the module.
    """
    calls: list[None] = []

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        calls.append(None)
        return (hidden_BSD[positions.batch_row_K, positions.column_K][None], *others)

    with _hooked(calls, head, "output embeddings", head.register_forward_pre_hook(before, prepend=True)):
        yield


def works_in_chunks(head: nn.Module) -> bool:
    """Whether ranks may call a head's forward different numbers of times: not where each call gathers parameters, as FSDP1 does
    those of units inside it (a LoRA's matrices)."""
    return not units_of(unwrapped(head))


@contextmanager
def sum_log_probs(
    head: nn.Module, targets: Targets, temperature: float, *, with_all: bool = False
) -> Iterator[list[torch.Tensor]]:
    """While open, the model puts out the sum of the targets' log-probabilities where it else puts out logits; to be read with
    :func:`read_sum`.

    The logits of :data:`CHUNK_POSITIONS` targets are held at a time, and computed again in the backward. Both happens where
    sharding wrappers hold the whole parameters: inside the output embeddings' forward, and after the gradient of their
    output. Equal to :func:`negative_log_likelihood` of all logits up to the order of a sum, for models with
    :func:`grail_advantage.model.architecture.has_plain_logits`.

    Args:
        head: the model's output embeddings, (B, S, D) to (B, S, V), bare or wrapped (FSDP, PEFT).
        targets: of the model's forward.
        temperature: sampling temperature, greater than 0.
        with_all: append the logits of all columns, (B, S, V), outside the graph, to the list.

    Raises:
        ValueError: the forward does not call the module.
    """
    head = unwrapped(head)
    everywhere: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []

    def of_chunk(hidden_KD: torch.Tensor, tokens_K: torch.Tensor, *others: Any) -> torch.Tensor:
        return -negative_log_likelihood(head.forward(hidden_KD[None], *others)[0], tokens_K, temperature)

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        if with_all:
            everywhere.append(_all_logits(head, hidden_BSD, *others))
        hidden_KD = hidden_BSD[targets.batch_row_K, targets.column_K]
        chunks = zip(hidden_KD.split(CHUNK_POSITIONS), targets.tokens_K.split(CHUNK_POSITIONS), strict=True)
        sums.append(sum(checkpoint(of_chunk, *chunk, *others, use_reentrant=False) for chunk in chunks))
        return (hidden_BSD[:1, :1], *others)

    def after(_module: nn.Module, _args: tuple, _logits: torch.Tensor) -> torch.Tensor:
        # No view, which FSDP2 warns of.
        return torch.cat([sums[-1].reshape(1, 1, 1), sums[-1].new_full((1, 1, 1), MARK)], dim=-1)

    # First among the hooks: those that gather parameters for the backward must see the tensors that take part in it.
    handles = head.register_forward_pre_hook(before), head.register_forward_hook(after, prepend=True)
    with _hooked(sums, head, "output embeddings", *handles):
        yield everywhere


def read_sum(logits: torch.Tensor) -> torch.Tensor:
    """The scalar that :func:`sum_log_probs` sent through a model, float32.

    Raises:
        ValueError: the model changes its logits.
    """
    if logits.shape != (1, 1, 2) or logits.dtype != torch.float32 or float(logits[0, 0, 1].detach()) != MARK:
        raise ValueError(
            "the model changes its logits after the output embeddings, which the probe of its code did not show; use a method "
            "without a pass"
        )
    return logits[0, 0, 0]


@contextmanager
def capture_hidden_states(head: nn.Module) -> Iterator[list[torch.Tensor]]:
    """While open, each forward of the output embeddings appends its input, (B, S, D) and detached, to the list, and computes
    the logits of the first column alone. The hook is gone afterwards, whatever happened inside.

    Args:
        head: the model's output embeddings, bare or wrapped (FSDP, PEFT).

    Raises:
        ValueError: the forward does not call the module.
    """
    captured_BSD: list[torch.Tensor] = []

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        captured_BSD.append(hidden_BSD.detach())
        return (hidden_BSD[:, :1], *others)

    with _hooked(captured_BSD, head, "output embeddings", head.register_forward_pre_hook(before)):
        yield captured_BSD


@contextmanager
def capture_log_probs(
    head: nn.Module, targets: Targets, temperature: float, *, entropy: bool
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """While open, each forward of the output embeddings appends :func:`log_probs_and_entropy` of the targets to the list, and
    computes the logits of the first column alone. For forwards without gradients of models with
    :func:`grail_advantage.model.architecture.has_plain_logits`; the logits of :data:`POSITIONS_TOGETHER` targets are held at a
    time. The hook is gone afterwards, whatever happened inside.

    Raises:
        ValueError: the forward does not call the module.
    """
    head = unwrapped(head)
    captured: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def before(_module: nn.Module, args: tuple) -> tuple:
        hidden_BSD, *others = args
        hidden_KD = hidden_BSD[targets.batch_row_K, targets.column_K]
        chunks = zip(hidden_KD.split(POSITIONS_TOGETHER), targets.tokens_K.split(POSITIONS_TOGETHER), strict=True)
        parts = [
            log_probs_and_entropy(head.forward(some_KD[None], *others)[0], some_K, temperature, entropy=entropy)
            for some_KD, some_K in chunks
        ]
        log_probs, entropies = zip(*parts, strict=True)
        captured.append((torch.cat(log_probs), torch.cat(entropies) if entropy else None))
        return (hidden_BSD[:1, :1], *others)

    with _hooked(captured, head, "output embeddings", head.register_forward_pre_hook(before)):
        yield captured


@contextmanager
def evaluation_mode(model: nn.Module, *, checkpoint_blocks: bool = False) -> Iterator[None]:
    """Dropout off, gradient checkpointing as configured, gradients on; every module's mode is put back afterwards.

    A checkpointed block runs in evaluation mode inside its checkpoint, and only seems to train to the code around it
    (:func:`grail_advantage.model.patches.checkpointing_in_evaluation`). FSDP1 units reshard as in training
    (:func:`grail_advantage.model.patches.resharding`).

    Args:
        model: bare or wrapped.
        checkpoint_blocks: ``True`` checkpoints the blocks whatever is configured: where training saves memory in another way.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    from grail_advantage.model.patches import checkpointing_in_evaluation, resharding

    modes = [(module, module.training) for module in model.modules()]
    known = [module for module, _ in modes if isinstance(module, GradientCheckpointingLayer)]
    blocks = [module for module in known if checkpoint_blocks or module.gradient_checkpointing]
    asked = checkpoint_blocks or any(getattr(module, "gradient_checkpointing", False) for module, _ in modes)
    if asked and not blocks:
        _warn_of_activations(type(inner_model(model)).__name__)
    try:
        model.eval()
        with (
            checkpointing_in_evaluation(blocks),
            resharding(units_of(model)),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training


@cache
def _warn_of_activations(model: str) -> None:
    logger.warning(
        "the decoder blocks of %s are no transformers GradientCheckpointingLayer and are not checkpointed in evaluation mode: "
        "a backward to its activations holds those of a whole micro-batch; if memory runs out, lower "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu",
        model,
    )


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


def log_probs_and_entropy(
    logits_KV: torch.Tensor, tokens_K: torch.Tensor, temperature: float, *, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each token, and the entropy, in nats, of the distribution that it is drawn from; float32, (K,).

    Args:
        logits_KV: logits of the tokens' predictor positions, any floating dtype.
        tokens_K: int64.
        temperature: sampling temperature, greater than 0.
        entropy: whether the second is computed; ``None`` otherwise.
    """
    log_probs, entropies = [logits_KV.new_zeros(0, dtype=torch.float32)], [logits_KV.new_zeros(0, dtype=torch.float32)]
    for some_KV, some_K in zip(logits_KV.split(POSITIONS_TOGETHER), tokens_K.split(POSITIONS_TOGETHER), strict=True):
        all_KV = torch.log_softmax(some_KV.float() / temperature, dim=-1)
        log_probs.append(all_KV.gather(-1, some_K.unsqueeze(-1)).squeeze(-1))
        if entropy:
            # A word that is ruled out (probability 0, logit -inf) adds nothing; NaN stays.
            entropies.append(-torch.where(all_KV == -torch.inf, 0, all_KV.exp() * all_KV).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies) if entropy else None


def gradient_at(loss: torch.Tensor, leaf_BSD: torch.Tensor) -> torch.Tensor:
    """Gradient of ``loss`` at the leaf alone, float32 (B, S, D).

    Raises:
        ValueError: a layer between them, such as a quantised one, passes no gradient.
    """
    found = torch.autograd.grad(loss, leaf_BSD, allow_unused=True)[0] if loss.requires_grad else None
    if found is None:
        raise ValueError(
            "model has layers that pass no gradient, as torch's int8 linears; load it without quantisation, or take a method "
            "without a backward, such as surprisal or entropy"
        )
    return found.float()


def saliency(loss: torch.Tensor, leaf_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward from ``loss`` to the leaf alone.

    Returns:
        ``(saliency_BS, gradient_norm_BS)``, float32: ``|| g * h ||_2`` and ``|| g ||_2`` of every position.
    """
    gradient_BSD = gradient_at(loss, leaf_BSD)
    saliency_BS = torch.linalg.vector_norm(gradient_BSD * leaf_BSD.detach().float(), dim=-1)
    return saliency_BS, torch.linalg.vector_norm(gradient_BSD, dim=-1)
