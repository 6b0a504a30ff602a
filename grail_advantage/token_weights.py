"""Token weights for any Hugging Face causal language model.

Several responses go through the model together, as a budget of tokens allows
(:mod:`grail_advantage.model.hugging_face`). The verl extension does the same in packed, sharded micro-batches and is
tested against this module.

Shape suffixes: B responses, L prompt + response, T response tokens, S positions of one response without its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, find_generated_spans
from grail_advantage.batch import (
    ENTROPY,
    EXAMPLES,
    FIELD,
    GROUPS,
    MESSAGES,
    OLD_LOG_PROBS,
    REWARDS,
    TOKENS,
    Example,
    PassRow,
    RolloutBatch,
    check_tensor,
    token_mean,
)
from grail_advantage.metrics import weight_metrics
from grail_advantage.model.activations import FORWARD_TOKENS
from grail_advantage.signals.base import RowSelection, Signal
from grail_advantage.weighting import batch_weights, put_row, scores_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grail_advantage.model.hugging_face import HuggingFaceModel

ROUNDING = 1e-3
"""Most that rounding puts a log-probability above 0."""


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
    from grail_advantage.model.hugging_face import HuggingFaceModel  # not above: naming the methods would import it

    if not isinstance(config, Signal):
        raise ValueError(
            f"config={config!r} must be a method with its options, such as Grail(); "
            "grail_advantage.methods.method(name).build(options) makes one from a name"
        )
    signal = config
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0; pass the temperature of the sampling")
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1; 1 sends each response through the model alone")
    rollouts = _Rollouts(
        input_ids, attention_mask, response_mask, advantages, groups, masked, examples, fields or {}, rewards
    )
    given_BL = {OLD_LOG_PROBS: old_log_probs, ENTROPY: entropy}
    given_BL = {name: values_BL for name, values_BL in given_BL.items() if values_BL is not None}
    rollouts.check(signal, given_BL)
    mask_BT = rollouts.mask_BT
    spans = find_generated_spans(rollouts.responses, tokenizer, signal.span, answer)
    advantages_B = advantages.to(mask_BT.device)
    if masked is not None:
        masked = masked.to(mask_BT.device).bool()
        advantages_B = torch.where(masked, 0.0, advantages_B)
    batch = RolloutBatch(
        mask_BT,
        advantages_B,
        spans,
        columns_BT={},
        aggregate=aggregate,
        step=step,
        examples=examples,
        masked_B=masked,
        groups_B=groups.long() if groups is not None else None,
        tokens_BT=rollouts.tokens_BT if TOKENS in signal.reads else None,
        tokenizer=tokenizer,
        fields=rollouts.fields,
        rewards_B=rewards.to(mask_BT.device) if rewards is not None else None,
        messages_BT=rollouts.messages_BT if MESSAGES in signal.reads else None,
    )
    rows = signal.select(batch)

    with torch.inference_mode(False):  # the caller may be in it, and nothing made there can take part in a backward
        of_pass_BT = torch.full(mask_BT.shape, float("nan"), device=mask_BT.device)
        gradient_norms = torch.zeros(0)
        if rows.selected_B.any() or process_group is not None:
            host = HuggingFaceModel(model, tokenizer, temperature, mask_BT.device, process_group, step, tokens)
            pass_rows = rollouts.pass_rows(spans)
            columns_BT = {
                name: rollouts.to_responses(values_BL) for name, values_BL in given_BL.items() if name in signal.reads
            }
            missing = [name for name in (OLD_LOG_PROBS, ENTROPY) if name in signal.reads and name not in columns_BT]
            if missing:
                columns_BT |= _statistics(host, pass_rows, mask_BT, missing)
            batch = replace(batch, columns_BT=columns_BT)
            if signal.uses:
                signal.check_tokenizer(tokenizer)
                selected = [row for row, wanted in zip(pass_rows, rows.selected_B.tolist(), strict=True) if wanted]
                prepared = [signal.prepare_row(row, tokenizer) for row in selected]
                scores = host.fitting(lambda: signal.run(prepared, host))
                for row, of_row in zip(selected, scores, strict=True):
                    put_row(of_pass_BT, row.place, row.response_length, of_row, signal)
                norms = [of_row.gradient_norms.cpu() for of_row in scores if of_row.gradient_norms is not None]
                gradient_norms = torch.cat([gradient_norms, *norms])

    scores_BT = scores_of(signal, batch, rows, of_pass_BT if signal.uses else None)
    result = batch_weights(scores_BT, batch, rows, signal)
    return TokenWeights(
        weights=rollouts.to_full_width(result.weights_BT, 0.0),
        advantages=rollouts.to_full_width(
            result.advantages(batch.advantages_B.float().unsqueeze(1).expand(mask_BT.shape), mask_BT), 0.0
        ),
        scores=rollouts.to_full_width(of_pass_BT if scores_BT is None else scores_BT, float("nan")),
        spans=spans,
        stats=weight_metrics(result, mask_BT, batch.advantages_B, rows, gradient_norms),
        rows=rows,
        non_finite=result.non_finite_B,
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
    from grail_advantage.model.hugging_face import HuggingFaceModel

    nothing_B = torch.zeros(len(input_ids))
    rollouts = _Rollouts(input_ids, attention_mask, response_mask, nothing_B, None, None, None, {}, None)
    host = HuggingFaceModel(model, tokenizer, temperature, input_ids.device, None, 0, tokens)
    rows = rollouts.pass_rows([None] * len(input_ids))
    columns_BT = _statistics(host, rows, rollouts.mask_BT, (OLD_LOG_PROBS, ENTROPY))
    return rollouts.to_full_width(columns_BT[OLD_LOG_PROBS], 0.0), rollouts.to_full_width(columns_BT[ENTROPY], 0.0)


def _statistics(
    model: HuggingFaceModel, rows: Sequence[PassRow], mask_BT: torch.Tensor, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Columns (B, T) from one forward over every response, 0 outside the mask."""
    columns_BT = {name: torch.zeros(mask_BT.shape, device=mask_BT.device) for name in names}
    answered = [row for row in rows if row.response_length]
    statistics = model.micro_batches(
        answered, lambda micro: micro.statistics(entropy=ENTROPY in names), gradients=False
    )
    for row, of_row in zip(answered, statistics, strict=True):
        for name in names:
            columns_BT[name][row.place, : row.response_length] = of_row[name]
    return {name: torch.where(mask_BT, values_BT, 0.0) for name, values_BT in columns_BT.items()}


@dataclass(frozen=True)
class _Rollouts:
    """The responses as the caller gives them, see :func:`compute_token_weights`."""

    input_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    response_mask_BL: torch.Tensor
    advantages_B: torch.Tensor
    groups_B: torch.Tensor | None
    masked_B: torch.Tensor | None
    examples: Sequence[Example] | None
    fields: Mapping[str, Sequence[Any]]
    rewards_B: torch.Tensor | None

    def check(self, signal: Signal, columns_BL: Mapping[str, torch.Tensor]) -> None:
        """Refuse parts that do not fit together, and a call without a part that the signal reads."""
        check_tensor("input_ids", self.input_ids_BL)
        shape = tuple(self.input_ids_BL.shape)
        if len(shape) != 2:
            raise ValueError(f"input_ids must be (B, L), got shape {shape}")
        masks_BL = {"attention_mask": self.attention_mask_BL, "response_mask": self.response_mask_BL}
        for name, values_BL in {**masks_BL, **columns_BL}.items():
            check_tensor(name, values_BL)
            if values_BL.shape != shape:
                raise ValueError(f"{name} has shape {tuple(values_BL.shape)}, input_ids {shape}; they must agree")
        for name, values_B in {
            "advantages": self.advantages_B,
            "masked": self.masked_B,
            "groups": self.groups_B,
            "rewards": self.rewards_B,
        }.items():
            if values_B is None and name != "advantages":
                continue
            check_tensor(name, values_B)
            if values_B.shape != shape[:1]:
                raise ValueError(
                    f"{name} must be one number a response, shape ({shape[0]},); got {tuple(values_B.shape)}"
                )
        self._check_response()
        known = columns_BL[OLD_LOG_PROBS][self.response_BL] if OLD_LOG_PROBS in columns_BL else torch.zeros(0)
        if (known[known.isfinite()] > ROUNDING).any():
            highest = float(known[known.isfinite()].max())
            raise ValueError(
                f"{OLD_LOG_PROBS} holds {highest}; log-probabilities are at most 0: pass log p, not p or -log p"
            )
        if self.groups_B is not None:
            if self.groups_B.is_floating_point() or self.groups_B.is_complex() or self.groups_B.dtype == torch.bool:
                raise ValueError(f"groups must hold whole numbers, got {self.groups_B.dtype}; use torch.int64")
            if (self.groups_B < 0).any():
                raise ValueError(
                    f"groups holds {int(self.groups_B.min())}; numbers must be at least 0, as those of "
                    "torch.unique(groups, return_inverse=True)[1]"
                )
        for name, given in ((GROUPS, self.groups_B), (EXAMPLES, self.examples), (REWARDS, self.rewards_B)):
            if name in signal.reads and given is None:
                raise ValueError(f"{signal.name} reads {name}; pass {name}=")
        for name in signal.field_names:
            if name not in self.fields:
                raise ValueError(f"{signal.name} reads {FIELD}{name}; pass fields={{{name!r}: ...}}")

    def _check_response(self) -> None:
        if (self.response_BL & ~self.valid_BL).any():
            raise ValueError("response_mask marks a padding token; it must lie inside attention_mask")
        for row, (inside_L, valid_L) in enumerate(zip(self.response_BL, self.valid_BL, strict=True)):
            if inside_L[valid_L][:1].any():
                raise ValueError(f"response {row} has no prompt token before it; add at least one")

    @cached_property
    def valid_BL(self) -> torch.Tensor:
        return self.attention_mask_BL.bool()

    @cached_property
    def response_BL(self) -> torch.Tensor:
        return self.response_mask_BL.bool()

    @cached_property
    def whole_BL(self) -> torch.Tensor:
        """bool; the responses with what tools and users said in them."""
        begun_BL = self.response_BL.cumsum(dim=-1) > 0
        goes_on_BL = self.response_BL.flip(-1).cumsum(dim=-1).flip(-1) > 0
        return begun_BL & goes_on_BL & self.valid_BL

    @cached_property
    def whole_BT(self) -> torch.Tensor:
        """bool; the same, padded on the right to the longest."""
        lengths_B1 = self.whole_BL.sum(dim=-1, keepdim=True)
        width = int(lengths_B1.max()) if len(lengths_B1) else 0
        return torch.arange(width, device=self.input_ids_BL.device) < lengths_B1

    @cached_property
    def mask_BT(self) -> torch.Tensor:
        """bool; the tokens that the model wrote."""
        mask_BT = torch.zeros_like(self.whole_BT)
        mask_BT[self.whole_BT] = self.response_BL[self.whole_BL]
        return mask_BT

    @property
    def messages_BT(self) -> torch.Tensor:
        """int64; the responses with what tools and users said, -1 after their ends."""
        messages_BT = torch.full(self.whole_BT.shape, -1, dtype=torch.int64, device=self.input_ids_BL.device)
        messages_BT[self.whole_BT] = self.input_ids_BL[self.whole_BL].long()
        return messages_BT

    @property
    def tokens_BT(self) -> torch.Tensor:
        """int64; the responses, -1 outside the mask."""
        return torch.where(self.mask_BT, self.messages_BT, -1)

    @property
    def responses(self) -> list[torch.Tensor]:
        """int64 each; the responses, -1 in place of the tokens that the model did not write."""
        return [tokens_T[whole_T] for tokens_T, whole_T in zip(self.tokens_BT, self.whole_BT, strict=True)]

    def pass_rows(self, spans: Sequence[AnswerSpan | None]) -> list[PassRow]:
        """Each prompt and response without padding, and without the tokens after the response, on which no score depends."""
        rows = []
        for index, (ids_L, valid_L) in enumerate(zip(self.input_ids_BL, self.valid_BL, strict=True)):
            inside_S = self.whole_BL[index, valid_L]
            length = int(inside_S.sum())
            start = int(inside_S.nonzero()[0]) if length else len(inside_S)
            rows.append(
                PassRow(
                    tokens_S=ids_L[valid_L][: start + length],
                    response_start=start,
                    response_length=length,
                    span=spans[index],
                    advantage=float(self.advantages_B[index].detach()),
                    group=int(self.groups_B[index]) if self.groups_B is not None else index,
                    place=index,
                    example=self.examples[index] if self.examples is not None else None,
                )
            )
        return rows

    def to_responses(self, values_BL: torch.Tensor) -> torch.Tensor:
        """Values of the response tokens as (B, T) float32, 0 outside the mask."""
        values_BT = torch.zeros(self.mask_BT.shape, device=self.input_ids_BL.device)
        values_BT[self.mask_BT] = values_BL.detach()[self.response_BL].float()
        return values_BT

    def to_full_width(self, values_BT: torch.Tensor, fill: float) -> torch.Tensor:
        """The reverse, (B, L) float32, ``fill`` outside the response."""
        values_BL = torch.full(self.input_ids_BL.shape, fill, dtype=torch.float32, device=values_BT.device)
        values_BL[self.response_BL] = values_BT[self.mask_BT]
        return values_BL
