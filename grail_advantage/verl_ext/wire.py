"""Rows on their way from the trainer to the workers, and scores on their way back.

Shape suffixes: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.batch import PassRow
from grail_advantage.model.interface import RowScores
from grail_advantage.signals.base import Signal

NO_SPAN = (-1, -1, -1, -1)


def build_request(
    rows: Sequence[PassRow], signal: Signal, *, temperature: float, step: int = 0, pad_token: int | None = None
) -> TensorDict:
    """Rows for :func:`grail_advantage.verl_ext.worker.token_scores`.

    Args:
        rows: prepared rows.
        signal: the method.
        temperature: sampling temperature.
        step: training step.
        pad_token: the tokenizer's.

    Returns:
        TensorDict of batch size R with the nested ``input_ids``, a vector for each other part of a row, and the settings.
    """
    return tu.get_tensordict(
        {
            "input_ids": nested([row.tokens_S for row in rows]),
            "response_start": torch.tensor([row.response_start for row in rows]),
            "response_length": torch.tensor([row.response_length for row in rows]),
            "span": torch.tensor([_bounds(row.span) for row in rows]),
            "advantage": torch.tensor([row.advantage for row in rows], dtype=torch.float64),
            "group": torch.tensor([row.group for row in rows]),
            "place": torch.tensor([row.place for row in rows]),
        },
        non_tensor_dict={"signal": signal, "temperature": temperature, "step": step, "pad_token": pad_token},
    )


def rows_of(request: TensorDict) -> list[PassRow]:
    """The rows of a request."""
    names = ("response_start", "response_length", "span", "advantage", "group", "place")
    columns = zip(*(request[name].tolist() for name in names), strict=True)
    return [
        PassRow(tokens_S, start, length, AnswerSpan(*span) if span[0] >= 0 else None, advantage, group, place)
        for tokens_S, (start, length, span, advantage, group, place) in zip(
            request["input_ids"].unbind(), columns, strict=True
        )
    ]


def build_reply(rows: Sequence[RowScores]) -> TensorDict:
    """TensorDict of batch size R on the CPU with the nested float32 ``scores``, and the nested ``gradient_norm`` of a pass with
    gradients."""
    reply = {"scores": nested([row.scores_T.float().cpu() for row in rows])}
    if all(row.gradient_norms is not None for row in rows):
        reply["gradient_norm"] = nested([row.gradient_norms.cpu() for row in rows])
    return tu.get_tensordict(reply)


def nested(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of different lengths as one, as verl's TensorDicts hold them."""
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


def _bounds(span: AnswerSpan | None) -> tuple[int, int, int, int]:
    return (span.start, span.content_start, span.content_end, span.end) if span is not None else NO_SPAN
