"""Token weights for any Hugging Face causal language model. Shapes: B responses, L prompt + response, T response
tokens."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Example, Rollouts, Row, RowScores, checked, token_mean
from grail_advantage.method import Method
from grail_advantage.model.hooks import FORWARD_TOKENS
from grail_advantage.weigh import weigh

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grail_advantage.model.hugging_face import HuggingFaceModel

ROUNDING = 1e-3  # most that rounding puts a log-probability above 0, or an entropy below
MOST_UNKNOWN = 0.1  # share of response tokens that the tokenizer may not have, as embeddings are often padded


@dataclass(frozen=True)
class TokenWeights:
    """Result of :func:`compute_token_weights`."""

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
    config: Method,
    *,
    temperature: float = 1.0,
    old_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
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
    """Token weights for a batch of rollouts by any registered method.

    A response's weights depend on its padding and its neighbours by rounding alone, except where the method compares
    responses. The model keeps no parameter gradient, no hook and no changed training mode, also when this raises.
    Results have no graph, and lie where ``input_ids`` does.

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
    _need(isinstance(config, Method), "config", config, "a method with its options, such as Grail()")
    _need(callable(aggregate), "aggregate", aggregate, "a function of values and a mask, (B, T) both")
    _need(isinstance(fields, Mapping | None), "fields", fields, "a mapping of names to values, one a response")
    known = isinstance(examples, Sequence | None) and all(isinstance(of, Example | None) for of in examples or ())
    _need(known, "examples", examples, "a list of Example or None")
    _need(
        isinstance(process_group, ProcessGroup | None),
        "process_group",
        process_group,
        "a ProcessGroup of torch, or None",
    )
    _need(_is_number(temperature) and temperature > 0, "temperature", temperature, "that of the sampling, above 0")
    for name, value, least in (("step", step, 0), ("tokens", tokens, 1)):
        fits = _is_number(value) and value >= least and value == int(value)
        _need(fits, name, value, f"a whole number of at least {least}")
    rollouts = rollouts_of(
        model,
        tokenizer,
        input_ids,
        attention_mask,
        response_mask,
        {OLD_LOG_PROBS: old_log_probs, ENTROPY: entropy},
        advantages=advantages,
        answer=answer_format(answer),
        masked=masked,
        groups=groups,
        rewards=None if rewards is None else checked("rewards", rewards, "numbers").double(),
        examples=examples,
        fields=fields or {},
        mean=aggregate,
        step=int(step),
    )
    device = input_ids.device
    host = PlainHost(
        model, rollouts, temperature=temperature, process_group=process_group, tokens=tokens, device=device
    )
    w = weigh(host, config, None)

    def wide(values: Tensor, outside: float = 0.0) -> Tensor:
        found = torch.full(response_mask.shape, outside, dtype=torch.float32)
        found[response_mask.cpu().bool()] = values[rollouts.mask]
        return found.to(device)

    wides, of_responses = (wide(w.weights), wide(w.scores, torch.nan)), (w.selected.to(device), w.failed.to(device))
    return TokenWeights(*wides, rollouts.spans(config.span), dict(w.metrics), wide(w.advantages), *of_responses)


class PlainHost:
    """A Hugging Face model, bare or wrapped, as a host (:class:`grail_advantage.weigh.Host`); the arguments are those
    of :func:`compute_token_weights`, and the device that on which the model reads tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        responses: Rollouts,
        *,
        temperature: float = 1.0,
        process_group: ProcessGroup | None = None,
        tokens: int = FORWARD_TOKENS,
        device: torch.device | str = "cpu",
    ) -> None:
        self._hugging_face, self._responses, self._temperature = model, responses, float(temperature)
        self._group, self._tokens, self._device = process_group, int(tokens), torch.device(device)

    def rollouts(self) -> Rollouts:
        return self._responses

    def columns(self, names: Sequence[str], selected: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Those that the responses have already, and others from a forward over every response, 0 where it did not
        write."""
        if selected is not None and not selected and self._group is None:
            return {}
        r = self._responses
        found = {name: r.columns[name] for name in names if name in r.columns}
        missing = [name for name in names if name not in found]
        if not missing:
            return found
        rows = []
        for index, (prompt, response) in enumerate(zip(r.prompts, r.responses, strict=True)):
            tokens = torch.cat([prompt, response]).to(self._device)
            rows += [Row(tokens, len(prompt), len(response), None, 0.0, index, index)] * bool(len(response))
        with torch.inference_mode(False):  # as in scores()
            columns = self._model.micro_batches(rows, lambda micro: micro.columns(missing), gradients=False)
        for name in missing:
            values = torch.zeros(r.mask.shape)
            for row, of in zip(rows, columns, strict=True):
                values[row.index, : row.length] = of[name]
            found[name] = torch.where(r.written, values, 0.0)
        return found

    def scores(self, method: Method, rows: Sequence[Row]) -> list[RowScores]:
        if not rows and self._group is None:
            return []
        with torch.inference_mode(False):  # the caller may be in it, and nothing made there can take part in a backward
            moved = [replace(row, tokens=row.tokens.to(self._device)) for row in rows]
            return self._model.fitting(lambda: method.run(moved, self._model))

    @cached_property
    def _model(self) -> HuggingFaceModel:
        from grail_advantage.model.hugging_face import HuggingFaceModel  # not above: naming the methods would import it

        r = self._responses
        arguments = (r.tokenizer, self._temperature, self._device, self._group, r.step, self._tokens)
        model = HuggingFaceModel(self._hugging_face, *arguments)
        with torch.inference_mode(False):  # as in scores()
            model.check_logits([torch.cat(of) for of in zip(r.prompts, r.responses, strict=True) if len(of[1])])
        return model


def rollouts_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    columns: Mapping[str, Tensor | None],
    **parts: Any,
) -> Rollouts:
    """Padded rows, as :func:`compute_token_weights` takes them, as rollouts without padding and without the tokens
    after the response, on which no score depends. ValueError, naming the argument."""
    ids = checked("input_ids", input_ids, "whole")
    _need(ids.ndim == 2, "input_ids", tuple(ids.shape), "of shape (B, L)")
    valid = checked("attention_mask (beside input_ids)", attention_mask, "flags", ids.shape)
    inside = checked("response_mask (beside input_ids)", response_mask, "flags", ids.shape)
    given = {name: checked(name, of, "floats", ids.shape) for name, of in columns.items() if of is not None}
    if (inside & ~valid).any():
        raise ValueError("response_mask marks a padding token; it must lie inside attention_mask")
    for name, sign, fix in (
        (OLD_LOG_PROBS, 1.0, "at most 0: log p"),
        (ENTROPY, -1.0, "at least 0: the sum of -p log p"),
    ):
        wrong = [of for of in given[name][inside].tolist() if sign * of > ROUNDING] if name in given else []
        _need(not wrong, name, wrong[:1], fix)
    begun = inside.cumsum(dim=-1) > 0
    of_response = begun & (inside.flip(-1).cumsum(dim=-1).flip(-1) > 0) & valid
    lengths = of_response.sum(dim=-1, keepdim=True)
    there = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths
    _check_model(model, tokenizer, ids, of_response | (valid & ~begun), of_response)

    def aligned(values: Tensor, dtype: torch.dtype) -> Tensor:
        found = torch.zeros(there.shape, dtype=dtype)
        found[there] = values[of_response].to(dtype)
        return found

    mask = aligned(inside, torch.bool)
    return Rollouts(
        prompts=[of[use] for of, use in zip(ids, valid & ~begun, strict=True)],
        responses=[of[use] for of, use in zip(ids, of_response, strict=True)],
        mask=mask,
        tokenizer=tokenizer,
        columns={name: torch.where(mask, aligned(of, torch.float32), 0.0) for name, of in given.items()},
        **parts,
    )


def _check_model(model: Any, tokenizer: Any, ids: Tensor, read: Tensor, wrote: Tensor) -> None:
    """ValueError, naming the argument, for a model or tokenizer that the token ids cannot be of."""
    from transformers import PreTrainedTokenizerBase  # not above: naming the methods would import it

    vectors: Any = None
    with suppress(Exception):  # transformers raises NotImplementedError, wrappers AttributeError
        vectors = model.get_input_embeddings()
    is_model, kind = isinstance(model, nn.Module) and isinstance(vectors, nn.Module), type(model).__name__
    _need(is_model, "model", kind, "a causal language model with get_input_embeddings()")
    # accelerate's hooks load what a forward needs.
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    there = offloaded or not all(values.is_meta for values in model.parameters())
    _need(there, "model", kind, "loaded, and not on the meta device")
    is_tokenizer = isinstance(tokenizer, PreTrainedTokenizerBase)
    _need(is_tokenizer, "tokenizer", type(tokenizer).__name__, "a loaded one of transformers")
    known, some = getattr(vectors, "num_embeddings", math.inf), ids[read]
    wrong = some[(some < 0) | (some >= known)].tolist()[:1]
    _need(
        not wrong, "input_ids", wrong, f"of the model, which knows 0 to {known - 1}; mask padding with attention_mask"
    )
    unknown = float((ids[wrote] >= len(tokenizer)).double().mean()) if wrote.any() else 0.0
    _need(unknown <= MOST_UNKNOWN, "tokenizer", kind, f"the model's own; it lacks {unknown:.0%} of the response tokens")


def _need(fits: object, name: str, given: object, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}={given!r} must be {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
