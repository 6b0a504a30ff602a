"""This module computes token weights with any Hugging Face causal language model. Shapes: B responses, L prompt +
response, T response tokens."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.data import (
    ENTROPY,
    OF_POLICY,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    Example,
    Rollouts,
    Row,
    RowScores,
    checked,
    token_mean,
)
from grail_advantage.method import BaseMethod
from grail_advantage.model.hooks import FORWARD_TOKENS, has_adapter
from grail_advantage.weigh import weigh

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ROUNDING = 1e-3  # most that rounding puts a log-probability above 0, or an entropy below
# Share of response tokens that the tokenizer may not have, as embeddings are often padded
MOST_UNKNOWN = 0.1


@dataclass(frozen=True)
class TokenWeights:
    """This is what :func:`compute_token_weights` gives."""

    weights: Tensor  # (B, L) float32; 0 outside the response
    scores: Tensor  # (B, L) float32, aligned to tokens; NaN where none was computed
    spans: list[AnswerSpan | None]  # relative to each response's first token
    stats: dict[str, float]  # figures of the batch, see grail_advantage.metrics
    advantages: Tensor  # (B, L) float32; the token advantages A_t, 0 outside the response
    selected: Tensor  # (B,) bool; the responses that the method scored
    failed: Tensor  # (B,) bool; scored responses that have weight 1 because a score of theirs is not finite


def compute_token_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    config: BaseMethod,
    *,
    temperature: float = 1.0,
    old_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    groups: Tensor | None = None,
    examples: Sequence[Example] | None = None,
    masked: Tensor | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
    rewards: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    step: int = 0,
    aggregate: Callable[[Tensor, Tensor], float] = token_mean,
    answer: str | AnswerFormat = BOXED,
    tokens: int = FORWARD_TOKENS,
) -> TokenWeights:
    """Compute token weights for a batch of rollouts by any registered method.

    A response's weights depend on its padding and its neighbours by rounding alone, except where the method compares
    responses. The model keeps no parameter gradient, no hook and no changed training mode, also when this raises; one
    thread at a time may use it. Results have no graph, and lie where ``input_ids`` does. In half precision weights are
    those of float32 to about 0.03 with GRAIL and 0.07 with ``oar_p``, while the scores of ``oar_g`` are mostly noise.

    Args:
        model: a causal language model.
        tokenizer: the tokenizer that the token ids belong to.
        input_ids: (B, L) int64, prompt + response, padded on either side. Tokens after the response change nothing.
        attention_mask: (B, L) bool or 0/1.
        response_mask: (B, L) bool or 0/1, the tokens that the model wrote. Those between them, as a tool's, train
            nothing.
        advantages: (B,) one advantage a response. One that is not finite counts as 0.
        config: the method and its options, such as :class:`grail_advantage.Grail`.
        temperature: sampling temperature that logits are divided by, where the method does that.
        old_log_probs: (B, L) float; each response token's log-probability at this temperature under the policy before
            the update.
        entropy: (B, L) float; that policy's entropy at its predictor position. Both are computed where a method reads
            them.
        ref_log_probs: (B, L) float; likewise under a reference. Where a method reads them and they are not given, they
            are those of the model with its adapter (a ``PeftModel``'s) switched off.
        groups: (B,) int64, at least 0; responses with the same number answer the same prompt.
        examples: each response's prompt as messages and its columns, for methods that ask differently.
        masked: (B,) bool; responses that train nothing whatever their reward, such as truncated ones.
        fields: by name, one value a response of any kind, for methods that read ``field:NAME``.
        rewards: (B,) float; the sum of each response's rewards, for methods that read them.
        process_group: of the ranks over which the model is sharded (FSDP, ZeRO-3). Each may have other responses, and
            another number of them. Methods that rank the tokens of a batch see those of their own rank.
        step: training step, at least 0, for methods that change over a run.
        aggregate: a batch's mean of (B, T) values under a (B, T) mask as the run's loss takes it; by default over all
            tokens.
        answer: the format of answers, see :func:`grail_advantage.answers.format.answer_format`.
        tokens: most tokens of a forward, padding counted; a longer response goes alone. Where memory runs out the
            budget is halved, and stays so for this model; not with a ``process_group``.

    Raises:
        ValueError: an argument of the wrong type, shape, dtype or range, or one that the method lacks; naming it.
    """
    _need(
        isinstance(config, BaseMethod),
        "config",
        config,
        "a method with its options, such as Grail()",
    )
    are_examples = isinstance(examples, Sequence | None) and all(
        isinstance(example, Example | None) for example in examples or ()
    )
    _need(are_examples, "examples", examples, "a list of Example or None")
    _need(
        _is_number(temperature) and temperature > 0,
        "temperature",
        temperature,
        "that of the sampling, above 0",
    )
    for name, value, least in (("step", step, 0), ("tokens", tokens, 1)):
        fits = _is_number(value) and value >= least and value == int(value)
        _need(fits, name, value, f"a whole number of at least {least}")
    columns = {OLD_LOG_PROBS: old_log_probs, ENTROPY: entropy, REF_LOG_PROBS: ref_log_probs}
    rollouts = Rollouts.from_padded(
        input_ids,
        attention_mask,
        response_mask,
        columns=columns,
        advantages=advantages,
        tokenizer=tokenizer,
        answer=answer_format(answer),
        masked=masked,
        groups=groups,
        rewards=None if rewards is None else checked("rewards", rewards, "numbers").double(),
        examples=examples,
        fields=fields or {},
        mean=aggregate,
        step=int(step),
    )
    inside = response_mask.cpu().bool()
    for name, values in columns.items():
        if values is not None:
            _check_values(name, values.cpu()[inside])
    _check_model(model, tokenizer, rollouts)
    host = PlainHost(
        model,
        rollouts,
        temperature=temperature,
        process_group=process_group,
        tokens=tokens,
        device=input_ids.device,
    )
    weighed = weigh(rollouts, config, host)

    def wide(values: Tensor, outside: float = 0.0) -> Tensor:
        """Put values (B, T) where the ids are, (B, L)."""
        values_BL = values.new_full(inside.shape, outside)
        # Both masks mark the same tokens in the same order; padding and tools' tokens are in neither.
        return values_BL.masked_scatter(inside, values[rollouts.mask]).to(input_ids.device)

    return TokenWeights(
        weights=wide(weighed.weights),
        scores=wide(weighed.scores, math.nan),
        spans=rollouts.spans(config.span),
        stats=dict(weighed.metrics),
        advantages=wide(weighed.advantages),
        selected=weighed.selected.to(input_ids.device),
        failed=weighed.failed.to(input_ids.device),
    )


class PlainHost:
    """A Hugging Face model in this process, bare or wrapped, serves a batch of rollouts as its host
    (:class:`grail_advantage.weigh.Host`). The arguments are those of :func:`compute_token_weights`, and the device that
    on which the model reads tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        rollouts: Rollouts,
        *,
        temperature: float = 1.0,
        process_group: ProcessGroup | None = None,
        tokens: int = FORWARD_TOKENS,
        device: torch.device | str = "cpu",
    ) -> None:
        # Not above: naming the methods would import it.
        from grail_advantage.model.hugging_face import HuggingFaceModel

        self._rollouts = rollouts
        self._model = HuggingFaceModel(
            model,
            rollouts.tokenizer,
            temperature=temperature,
            device=device,
            group=process_group,
            step=rollouts.step,
            tokens=int(tokens),
        )

    def columns(
        self, names: Sequence[str], selected: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Run a forward over every response, and one with the adapter off where a reference is asked for; none runs
        where none is ``selected`` and no other rank waits. ValueError: there is no adapter."""
        if selected is not None and not selected and self._model.rounds.group is None:
            return {}
        of_policy = [name for name in names if name in OF_POLICY]
        columns = self._read(of_policy) if of_policy else {}
        if REF_LOG_PROBS in names:
            adapted: Any = self._model.model
            if not has_adapter(adapted):
                raise ValueError(
                    f"{REF_LOG_PROBS} are not there, and the model has no adapter to switch off; pass them"
                )
            with adapted.disable_adapter():
                columns[REF_LOG_PROBS] = self._read([OLD_LOG_PROBS])[OLD_LOG_PROBS]
        return columns

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        from grail_advantage.model.hugging_face import read_columns

        rows = self._rollouts.plain_rows()
        return self._rollouts.columns_from(rows, read_columns(names, rows, self._model), names)

    def scores(self, method: BaseMethod, rows: Sequence[Row]) -> list[RowScores]:
        from grail_advantage.model.hugging_face import run_rows

        return run_rows(method, rows, self._model)


def _check_values(name: str, values: Tensor) -> None:
    """Raise ValueError, naming the argument, for a value on the wrong side of 0 by more than rounding."""
    sign = 1.0
    allowed = "at most 0: log p"
    if name == ENTROPY:
        sign = -1.0
        allowed = "at least 0: the sum of -p log p"
    # Such as -log p, which a loss is, in place of log p.
    refused = values[sign * values > ROUNDING].tolist()[:1]
    _need(not refused, name, refused, allowed)


def _check_model(model: Any, tokenizer: Any, rollouts: Rollouts) -> None:
    """Raise ValueError, naming the argument, for a model or tokenizer that the token ids cannot be of."""
    # Not above: naming the methods would import it.
    from transformers import PreTrainedTokenizerBase

    kind = type(model).__name__
    vectors: Any = None
    with suppress(Exception):  # transformers raises NotImplementedError, wrappers AttributeError
        vectors = model.get_input_embeddings()
    is_model = isinstance(model, nn.Module) and isinstance(vectors, nn.Module)
    _need(is_model, "model", kind, "a causal language model with get_input_embeddings()")
    # accelerate's hooks load what a forward needs.
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    is_loaded = is_offloaded or not all(values.is_meta for values in model.parameters())
    _need(is_loaded, "model", kind, "loaded, and not on the meta device")
    is_tokenizer = isinstance(tokenizer, PreTrainedTokenizerBase)
    _need(is_tokenizer, "tokenizer", type(tokenizer).__name__, "a loaded one of transformers")
    vocabulary = getattr(vectors, "num_embeddings", math.inf)
    # On a GPU such an id ends in an assertion of the device, which names no argument.
    for ids in (*rollouts.prompts, *rollouts.responses):
        unknown = ids[(ids < 0) | (ids >= vocabulary)].tolist()[:1]
        remedy = (
            f"of the model, which knows 0 to {vocabulary - 1}; mask padding with attention_mask"
        )
        _need(not unknown, "input_ids", unknown, remedy)
    written = rollouts.tokens >= 0
    unknown_count = int((rollouts.tokens >= len(tokenizer)).sum())
    share = unknown_count / max(1, int(written.sum()))
    _need(
        share <= MOST_UNKNOWN,
        "tokenizer",
        kind,
        f"the model's own; it lacks {share:.0%} of the response tokens",
    )


def _need(fits: object, name: str, value: object, allowed: str) -> None:
    """Raise ValueError, naming the argument, for a value that does not fit."""
    if not fits:
        raise ValueError(f"{name}={value!r} must be {allowed}")


def _is_number(value: object) -> bool:
    # A bool is a Real, so that temperature=True would be 1.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
