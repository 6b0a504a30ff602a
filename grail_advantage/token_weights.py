"""Token weights for any Hugging Face causal language model.

Several responses go through the model together, as a budget of tokens allows
(:mod:`grail_advantage.model.hugging_face`). The verl extension does the same in packed, sharded micro-batches and is
tested against this module.

Shape suffixes: B responses, L prompt + response, T response tokens.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, Example, PassRow, token_mean
from grail_advantage.model.activations import FORWARD_TOKENS
from grail_advantage.model.interface import RowScores
from grail_advantage.pipeline import weigh
from grail_advantage.receipt.tensors import check_numbers, check_tensor
from grail_advantage.record import Rollouts
from grail_advantage.signals.base import RowSelection, Signal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grail_advantage.model.hugging_face import HuggingFaceModel


ROUNDING = 1e-3
"""Most that rounding puts a log-probability above 0, or an entropy below."""
MOST_UNKNOWN = 0.1
"""Share of response tokens that the tokenizer may not have, as a model's embeddings are often padded."""


@dataclass(frozen=True)
class TokenWeights:
    """Result of :func:`compute_token_weights`."""

    weights: torch.Tensor
    """(B, L) float32; 0 outside the response."""
    scores: torch.Tensor
    """(B, L) float32, aligned to tokens; NaN where none was computed."""
    spans: list[AnswerSpan | None]
    """Answer spans, relative to each response's first token."""
    stats: dict[str, float]
    """Figures of the batch, see :func:`grail_advantage.metrics.weight_metrics`."""
    advantages: torch.Tensor
    """(B, L) float32; the token advantages ``A_t``, 0 outside the response."""
    rows: RowSelection
    """Which responses the method scored."""
    non_finite: torch.Tensor
    """(B,) bool; scored responses that have weight 1 because a score of theirs is not finite."""


def compute_token_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    config: Signal,
    *,
    temperature: float = 1.0,
    old_log_probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    examples: Sequence[Example] | None = None,
    masked: torch.Tensor | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
    rewards: torch.Tensor | None = None,
    process_group: ProcessGroup | None = None,
    step: int = 0,
    aggregate: Callable[[torch.Tensor, torch.Tensor], float] = token_mean,
    answer: str | AnswerFormat = BOXED,
    tokens: int = FORWARD_TOKENS,
) -> TokenWeights:
    """Token weights for a batch of rollouts by any registered method.

    Each response is stripped of its padding, and its weights depend on its neighbours or on the side of the padding by rounding
    alone, except where the method compares responses (its page says so). Responses with advantage 0 have weight 1 with
    every method that does not compare responses: their token advantages are 0 in any case. The model keeps no parameter
    gradient, no hook and no changed training mode, also when this raises. Results have no graph; inputs that have one
    are detached.

    Args:
        model: a causal language model.
        tokenizer: the tokenizer that the token ids belong to.
        input_ids: (B, L) int64, prompt + response, padded on either side. Tokens after the response change nothing.
        attention_mask: (B, L) bool or 0/1.
        response_mask: (B, L) bool or 0/1, the tokens that the model wrote. Those between them, as a tool's, belong to the
            response and train nothing; a response without any has weight 0.
        advantages: (B,) one advantage a response. A response without a finite one is treated as one with advantage 0.
        config: the method and its options, such as :class:`grail_advantage.Grail`.
        temperature: sampling temperature that logits are divided by, where the method does that.
        old_log_probs: (B, L) float; log-probability of each response token at this temperature under the policy before the
            update. Computed with ``model`` where a method reads them and they are not given.
        entropy: (B, L) float; the policy's entropy at each response token's predictor position, likewise.
        groups: (B,) int64, at least 0; responses with the same number answer the same prompt; for methods that compare them.
        examples: each response's prompt as messages and its columns, for methods that ask differently.
        masked: (B,) bool; responses that train nothing whatever their reward, such as truncated ones. Their advantages
            count as 0.
        fields: by name, one value a response of any kind, for methods that read ``field:NAME``.
        rewards: (B,) float; the sum of each response's rewards, for methods that read them.
        process_group: with a model that is sharded over ranks (FSDP, ZeRO-3), the group of these ranks. Each may then have
            other responses, and another number of them: a rank that is through runs dummy passes until all are. Methods
            that rank the tokens of a batch see the responses of their own rank.
        step: training step, at least 0, for methods that change over a run.
        aggregate: a batch's mean of (B, T) values under a (B, T) mask as the run's loss takes it, for methods that compare it
            with a threshold; by default that of all tokens.
        answer: the format of answers: ``boxed``, ``hashes``, ``tag`` or a regular expression, see
            :func:`grail_advantage.answers.format.answer_format`.
        tokens: most tokens of a forward, padding counted; a longer response goes through the model alone, and with 1
            every response does. A pass holds less than an update by a micro-batch of as many tokens. Where memory runs
            out the budget is halved, and stays so for this model; not with a ``process_group``.

    Raises:
        ValueError: an argument of the wrong type, shape or dtype, a temperature or a budget that is not positive, a response
            that starts its row, log-probabilities above 0, a negative group or step, a tokenizer that the method
            cannot work with, an unknown format of answers; groups, rewards or examples that it needs. The message names
            the argument.
    """
    if not isinstance(config, Signal):
        raise ValueError(
            f"config={config!r} must be a method with its options, such as Grail(); "
            "grail_advantage.methods.method(name).build(options) makes one from a name"
        )
    check_tensor("advantages", advantages)
    check_numbers("advantages", advantages, "numbers")
    for name, values in (("groups", groups), ("masked", masked), ("rewards", rewards)):
        if values is not None:
            check_tensor(name, values)
    if masked is not None:
        check_numbers("masked", masked, "0 or 1")
    if rewards is not None:
        check_numbers("rewards", rewards, "numbers")
        rewards = rewards.detach() if rewards.is_floating_point() else rewards.float()
    _check_lists(examples, fields)
    if not callable(aggregate):
        raise ValueError(f"aggregate={aggregate!r} must be a function of values and a mask, (B, T) both")
    rollouts = _rollouts(
        model,
        tokenizer,
        input_ids,
        attention_mask,
        response_mask,
        {OLD_LOG_PROBS: old_log_probs, ENTROPY: entropy},
        advantages_B=advantages,
        answer=answer_format(answer),
        masked_B=masked,
        groups_B=groups,
        rewards_B=rewards,
        examples=examples,
        fields=fields or {},
    )
    host = PlainHost(
        model,
        rollouts,
        temperature=temperature,
        process_group=process_group,
        step=step,
        tokens=tokens,
        mean=aggregate,
        device=input_ids.device,
    )
    record = weigh(host, config, step)

    def full_width(values_BT: torch.Tensor, outside: float) -> torch.Tensor:
        return _full_width(values_BT, rollouts.mask_BT, response_mask, outside).to(input_ids.device)

    return TokenWeights(
        weights=full_width(record.weights_BT, 0.0),
        scores=full_width(record.scores_BT, torch.nan),
        spans=rollouts.spans(config.span),
        stats=dict(record.metrics),
        advantages=full_width(record.advantages_BT, 0.0),
        rows=RowSelection(**{name: of_B.to(input_ids.device) for name, of_B in vars(record.selection).items()}),
        non_finite=record.non_finite_B.to(input_ids.device),
    )


def response_statistics(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    temperature: float = 1.0,
    tokens: int = FORWARD_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``old_log_probs`` and ``entropy`` as :func:`compute_token_weights` computes them where they are not given; the arguments
    are the same.

    Returns:
        ``(log_probs_BL, entropy_BL)`` float32, 0 outside the response.
    """
    check_tensor("input_ids", input_ids)
    nothing_B = torch.zeros(input_ids.shape[:1])
    rollouts = _rollouts(model, tokenizer, input_ids, attention_mask, response_mask, {}, advantages_B=nothing_B)
    host = PlainHost(model, rollouts, temperature=temperature, tokens=tokens, device=input_ids.device)
    columns_BT = host.columns((OLD_LOG_PROBS, ENTROPY))
    log_probs_BL, entropy_BL = (
        _full_width(columns_BT[name], rollouts.mask_BT, response_mask, 0.0).to(input_ids.device)
        for name in (OLD_LOG_PROBS, ENTROPY)
    )
    return log_probs_BL, entropy_BL


class PlainHost:
    """A Hugging Face model as a host (:class:`grail_advantage.pipeline.Host`).

    Args:
        model: bare or wrapped.
        responses: of the update.
        temperature: sampling temperature.
        process_group: ranks whose parameters are sharded together.
        step: training step.
        tokens: most tokens of a forward, padding counted.
        mean: of a batch, as the run's loss takes it.
        device: where the model reads tokens.

    Raises:
        ValueError: a temperature or a budget that is not positive.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        responses: Rollouts,
        *,
        temperature: float = 1.0,
        process_group: ProcessGroup | None = None,
        step: int = 0,
        tokens: int = FORWARD_TOKENS,
        mean: Callable[[torch.Tensor, torch.Tensor], float] = token_mean,
        device: torch.device | str = "cpu",
    ) -> None:
        temperature = _number("temperature", temperature)
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"temperature={temperature} must be finite and greater than 0; pass the temperature of the sampling"
            )
        tokens, step = _whole("tokens", tokens), _whole("step", step)
        if tokens < 1:
            raise ValueError(f"tokens={tokens} must be at least 1; 1 sends each response through the model alone")
        if process_group is not None and not isinstance(process_group, ProcessGroup):
            raise ValueError(f"process_group={process_group!r} must be a torch.distributed.ProcessGroup, or None")
        self.mean = mean
        self._hugging_face, self._responses, self._temperature = model, responses, temperature
        self._group, self._step, self._tokens, self._device = process_group, step, tokens, torch.device(device)

    def rollouts(self) -> Rollouts:
        return self._responses

    def columns(self, names: Sequence[str], selected: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """The columns that the responses have already, and the others from one forward over every response, 0 outside what the
        model wrote."""
        if selected is not None and not selected and self._group is None:
            return {}
        responses = self._responses
        columns_BT = {name: responses.columns_BT[name] for name in names if name in responses.columns_BT}
        missing = [name for name in names if name not in columns_BT]
        if not missing:
            return columns_BT
        written_BT = responses.written_BT
        with torch.inference_mode(False):  # as in scores()
            columns_BT |= {name: torch.zeros(written_BT.shape) for name in missing}
            rows = [responses.pass_row(row) for row, response_T in enumerate(responses.responses) if len(response_T)]
            statistics = self._model.micro_batches(
                [self._on_device(row) for row in rows],
                lambda micro: micro.statistics(entropy=ENTROPY in missing),
                gradients=False,
            )
            for row, of_row in zip(rows, statistics, strict=True):
                for name in missing:
                    columns_BT[name][row.place, : row.response_length] = of_row[name]
            return columns_BT | {name: torch.where(written_BT, columns_BT[name], 0.0) for name in missing}

    def scores(self, signal: Signal, rows: Sequence[PassRow]) -> list[RowScores]:
        if not rows and self._group is None:
            return []
        tokenizer = self._responses.tokenizer
        signal.check_tokenizer(tokenizer)
        with torch.inference_mode(False):  # the caller may be in it, and nothing made there can take part in a backward
            prepared = [self._on_device(signal.prepare_row(row, tokenizer)) for row in rows]
            return self._model.fitting(lambda: signal.run(prepared, self._model))

    @cached_property
    def _model(self) -> HuggingFaceModel:
        from grail_advantage.model.hugging_face import HuggingFaceModel  # not above: naming the methods would import it

        responses = self._responses
        model = HuggingFaceModel(
            self._hugging_face,
            responses.tokenizer,
            self._temperature,
            self._device,
            self._group,
            self._step,
            self._tokens,
        )
        with torch.inference_mode(False):  # as in scores()
            parts = zip(responses.prompts, responses.responses, strict=True)
            model.check_positions([torch.cat(row) for row in parts if len(row[1])])
        return model

    def _on_device(self, row: PassRow) -> PassRow:
        return replace(row, tokens_S=row.tokens_S.to(self._device))


def _rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids_BL: torch.Tensor,
    attention_mask_BL: torch.Tensor,
    response_mask_BL: torch.Tensor,
    columns_BL: Mapping[str, torch.Tensor | None],
    **parts: Any,
) -> Rollouts:
    """Padded rows, as :func:`compute_token_weights` takes them, as rollouts: without padding, and without the tokens after the
    response, on which no score depends.

    Raises:
        ValueError: naming the argument.
    """
    check_tensor("input_ids", input_ids_BL)
    check_numbers("input_ids", input_ids_BL, "whole numbers")
    shape = tuple(input_ids_BL.shape)
    if len(shape) != 2:
        raise ValueError(f"input_ids must be (B, L), got shape {shape}")
    given_BL = {name: values_BL for name, values_BL in columns_BL.items() if values_BL is not None}
    masks_BL = {"attention_mask": attention_mask_BL, "response_mask": response_mask_BL}
    for name, values_BL in {**masks_BL, **given_BL}.items():
        check_tensor(name, values_BL)
        if values_BL.shape != shape:
            raise ValueError(f"{name} has shape {tuple(values_BL.shape)}, input_ids {shape}; they must agree")
        check_numbers(name, values_BL, "floats" if name in given_BL else "0 or 1")
    given_BL = {name: values_BL.detach().cpu() for name, values_BL in given_BL.items()}
    input_ids_BL = input_ids_BL.cpu().long()
    valid_BL, inside_BL = (values_BL.cpu().bool() for values_BL in masks_BL.values())
    if (inside_BL & ~valid_BL).any():
        raise ValueError("response_mask marks a padding token; it must lie inside attention_mask")
    begun_BL = inside_BL.cumsum(dim=-1) > 0
    whole_BL = begun_BL & (inside_BL.flip(-1).cumsum(dim=-1).flip(-1) > 0) & valid_BL
    lengths_B1 = whole_BL.sum(dim=-1, keepdim=True)
    width = int(lengths_B1.max()) if len(lengths_B1) else 0
    whole_BT = torch.arange(width) < lengths_B1
    _check_model(model, tokenizer, input_ids_BL, whole_BL | (valid_BL & ~begun_BL), whole_BL)

    def of_response(values_BL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values_BT = torch.zeros(whole_BT.shape, dtype=dtype)
        values_BT[whole_BT] = values_BL.detach()[whole_BL].to(dtype)
        return values_BT

    if isinstance(parts.get("masked_B"), torch.Tensor):
        parts["masked_B"] = parts["masked_B"].bool()
    for name, sign, fix in (
        (OLD_LOG_PROBS, 1.0, "log-probabilities are at most 0: pass log p, not p or -log p"),
        (ENTROPY, -1.0, "entropies are at least 0: pass the sum of -p log p"),
    ):
        wrong = sign * given_BL.get(name, torch.zeros(1, 1))[inside_BL if name in given_BL else ...] > ROUNDING
        if wrong.any():
            value = float(given_BL[name][inside_BL][wrong][0])
            raise ValueError(f"{name} holds {value}; {fix}")
    mask_BT = of_response(inside_BL, torch.bool)
    return Rollouts(
        prompts=[
            ids_L[valid_L & ~begun_L] for ids_L, valid_L, begun_L in zip(input_ids_BL, valid_BL, begun_BL, strict=True)
        ],
        responses=[ids_L[whole_L] for ids_L, whole_L in zip(input_ids_BL, whole_BL, strict=True)],
        mask_BT=mask_BT,
        tokenizer=tokenizer,
        columns_BT={
            name: torch.where(mask_BT, of_response(values_BL, torch.float32), 0.0)
            for name, values_BL in given_BL.items()
        },
        **parts,
    )


def _check_model(
    model: object,
    tokenizer: object,
    input_ids_BL: torch.Tensor,
    read_BL: torch.Tensor,
    response_BL: torch.Tensor,
) -> None:
    """Refuse a model or tokenizer that the token ids cannot be of.

    Raises:
        ValueError: naming the argument.
    """
    from transformers import PreTrainedTokenizerBase  # not above: naming the methods would import it

    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a causal language model, got {type(model).__name__}; load it first")
    vectors: Any = None
    with suppress(Exception):  # transformers raises NotImplementedError, wrappers AttributeError
        vectors = model.get_input_embeddings()
    if not isinstance(vectors, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__} without get_input_embeddings(); pass a causal language model of transformers"
        )
    # accelerate's hooks load what a forward needs.
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if all(values.is_meta for values in model.parameters()) and not offloaded:
        raise ValueError("model is on the meta device, without weights; load them first")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer must be one of transformers, got {type(tokenizer).__name__}; load it first")
    ids_N, of_model = input_ids_BL[read_BL], getattr(vectors, "num_embeddings", math.inf)
    wrong_N = ids_N[(ids_N < 0) | (ids_N >= of_model)]
    if len(wrong_N):
        raise ValueError(
            f"input_ids holds {int(wrong_N[0])}, and the model knows 0 to {of_model - 1}; pass the ids of its tokenizer, and "
            "mask padding and ignored labels with attention_mask"
        )
    ids_N = input_ids_BL[response_BL]
    unknown = float((ids_N >= len(tokenizer)).double().mean()) if len(ids_N) else 0.0
    if unknown > MOST_UNKNOWN:
        raise ValueError(
            f"tokenizer has {len(tokenizer)} tokens, beyond which {unknown:.0%} of the response tokens in input_ids are; pass "
            "the model's own"
        )


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be a number")
    return float(value)


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not number.is_integer() or number < 0:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 0")
    return int(number)


def _check_lists(examples: object, fields: object) -> None:
    if examples is not None and not isinstance(examples, list | tuple):
        raise ValueError(f"examples must be a list of Example, one a response; got {type(examples).__name__}")
    for example in examples or ():
        if example is not None and not isinstance(example, Example):
            raise ValueError(f"examples must hold grail_advantage.batch.Example, got {example!r}")
    if fields is not None and not isinstance(fields, Mapping):
        raise ValueError(f"fields must be a mapping of names to values, one a response; got {type(fields).__name__}")
    for name, values in (fields or {}).items():
        if (
            not isinstance(name, str)
            or not isinstance(values, Sequence | np.ndarray | torch.Tensor)
            or isinstance(values, str)
        ):
            raise ValueError(f"fields[{name!r}] must be a list with one value a response, got {values!r}")


def _full_width(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, response_mask_BL: torch.Tensor, outside: float
) -> torch.Tensor:
    """Values of response tokens in their places, (B, L) float32 on the CPU, ``outside`` elsewhere."""
    values_BL = torch.full(response_mask_BL.shape, outside, dtype=torch.float32)
    values_BL[response_mask_BL.cpu().bool()] = values_BT[mask_BT]
    return values_BL
