"""The analysis: weights of given responses by several methods, as a token dump.

Every method runs through :func:`grail_advantage.compute_token_weights`. Log-probabilities and entropies are computed once and
handed to all. A method that uses nothing of the model sees all responses as one batch; one that does sees the batches of
:func:`.columns.token_batches`.

A finished batch is a file of its own below ``parts``; the same analysis resumes after those that are there.

Shape suffixes: B rows, L prompt + response, T response tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage import __version__
from grail_advantage.answers.format import AnswerFormat
from grail_advantage.answers.missing import advice, is_low
from grail_advantage.answers.span import AnswerSpan, find_answer_spans
from grail_advantage.answers.text import TokenTexts, answer_text
from grail_advantage.batch import EXAMPLES, GROUPS, field_names, outcome_of
from grail_advantage.signals.base import Signal
from grail_advantage.token_weights import TokenWeights, compute_token_weights
from grail_advantage.view.analysis.analysis import Analysis, check_definition
from grail_advantage.view.analysis.columns import padded, response_statistics, token_batches
from grail_advantage.view.analysis.responses import Response, Tokens, example_of, tokenize
from grail_advantage.view.analysis.specs import described
from grail_advantage.view.dump.files import (
    DumpHeader,
    DumpRow,
    MethodColumns,
    read_dump,
    step_path,
    write_step,
)
from grail_advantage.view.dump.step import neutral_reasons

PARTS = "parts"


@dataclass(frozen=True)
class Outcome:
    """The result of :func:`run_analysis`."""

    path: Path
    """The file."""
    neutral: Mapping[str, Mapping[str, int]]
    """For each method how many rows have no scores, by reason."""
    unchanged: Sequence[str]
    """Methods that gave every token of every row the weight 1."""
    few_answers: str
    """A sentence where so few rows have an answer that something is wrong, with the remedy; empty elsewhere."""


def run_analysis(
    analysis: Analysis,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    *,
    progress: bool = True,
) -> Outcome:
    """Compute and write ``folder/step_000000.parquet``, resuming where an equal analysis was stopped.

    Args:
        analysis: what to compute.
        folder: where to; made where it is missing.
        tokenizer: the model's.
        load_model: gives the model, on its device; not called where all is done.
        progress: whether to show a bar on a terminal.

    Raises:
        ValueError: the folder holds another analysis; the message names the differences.
    """
    check_definition(analysis, folder)
    path = step_path(folder, 0)
    if path.exists():
        return _outcome(path, analysis, tokenizer)
    rows = _rows(analysis, tokenizer)
    model = load_model()
    computed = _with_model(analysis, rows, model, tokenizer, folder / PARTS, progress)
    computed = _without_model(analysis, rows, computed, model, tokenizer)
    first = next(iter(analysis.methods))
    ordered = [_with_first_method(computed[place], first) for place in range(len(rows))]
    write_step(folder, _header(analysis, tokenizer), ordered)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    return _outcome(path, analysis, tokenizer)


# ------------------------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class _Row:
    place: int
    response: Response
    tokens: Tokens
    texts: list[str]
    span: AnswerSpan | None
    advantage: float
    group: int

    @property
    def length(self) -> int:
        return len(self.tokens.prompt_P) + len(self.tokens.response_T)


def _rows(analysis: Analysis, tokenizer: PreTrainedTokenizerBase) -> list[_Row]:
    texts = TokenTexts(tokenizer)
    advantages, _ = analysis.row_advantages()
    which = next(iter(analysis.methods.values())).span
    groups: dict[str, int] = {}
    rows = []
    for place, response in enumerate(analysis.responses):
        tokens = tokenize(response, tokenizer, analysis.template_options)
        group = groups.setdefault(response.group if response.group is not None else f"row {place}", len(groups))
        (span,) = find_answer_spans([tokens.response_T], tokenizer, which, analysis.answer)
        rows.append(_Row(place, response, tokens, texts(tokens.response_T), span, advantages[place], group))
    return rows


def token_ranges(labels: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Ranges of characters as ranges of tokens: a token belongs where its first character is.

    Args:
        labels: half-open ranges, or lists of them, by name.
        texts: of the tokens; joined, the text that the characters are counted in.
    """
    starts_T = np.concatenate([[0], np.cumsum([len(text) for text in texts])])[:-1] if texts else np.zeros(0, dtype=int)
    # A token without text stands where the next one does, and belongs to what is before it.
    silent_T = np.array([not text for text in texts], dtype=bool)
    keys_T = np.where(silent_T, starts_T - 0.5, starts_T)

    def convert(ranges: Any) -> Any:
        if ranges and isinstance(ranges[0], Sequence):
            return [convert(entry) for entry in ranges]
        return [int(np.searchsorted(keys_T, edge)) for edge in ranges]

    return {name: convert(ranges) for name, ranges in labels.items()}


def _dump_row(
    row: _Row,
    answer: AnswerFormat,
    log_probs_T: np.ndarray,
    entropy_T: np.ndarray,
    methods: Mapping[str, MethodColumns],
) -> DumpRow:
    response, length = row.response, len(row.tokens.response_T)
    return DumpRow(
        step=0,
        row=row.place,
        key=response.id,
        group=row.group,
        id=response.id,
        prompt=row.tokens.prompt,
        response="".join(row.texts),
        gold=None if response.gold is None else str(response.gold),
        reward=response.reward,
        outcome=outcome_of(response.reward),
        answer=answer_text(row.texts, row.span, answer),
        span=row.span,
        prompt_ids=np.array(row.tokens.prompt_P, dtype=np.int64),
        token_ids_T=np.array(row.tokens.response_T, dtype=np.int64),
        tokens=row.texts,
        mask_T=np.ones(length, dtype=bool),
        weight_T=np.ones(length, dtype=np.float32),
        base_advantage_T=np.full(length, row.advantage, dtype=np.float32),
        old_log_prob_T=log_probs_T,
        entropy_T=entropy_T,
        methods=methods,
        labels=token_ranges(response.labels, row.texts),
    )


def _with_first_method(row: DumpRow, first: str) -> DumpRow:
    """The row with the columns of its first method as its own, and the methods in their order."""
    method = row.methods[first]
    return replace(
        row,
        score_T=method.score_T,
        weight_T=method.weight_T,
        advantage_T=method.weight_T * row.base_advantage_T,
        neutral=method.neutral,
    )


def _header(analysis: Analysis, tokenizer: PreTrainedTokenizerBase) -> DumpHeader:
    signal = next(iter(analysis.methods.values()))
    about = described(signal)
    return DumpHeader(
        step=0,
        method=signal.name,
        options=about["options"],
        reshaper=about["options"].get("reshaper"),
        model=analysis.model,
        temperature=analysis.temperature,
        rows_in_step=len(analysis.responses),
        special_tokens=TokenTexts(tokenizer).special_tokens,
        written_by=f"grail_advantage {__version__}",
        answer=analysis.answer.name if any(each.reads_answer for each in analysis.methods.values()) else None,
    )


def _outcome(path: Path, analysis: Analysis, tokenizer: PreTrainedTokenizerBase) -> Outcome:
    neutral: dict[str, dict[str, int]] = {label: {} for label in analysis.methods}
    unchanged = {label for label, signal in analysis.methods.items() if signal.gives == "weights"}
    dump = read_dump(path.parent)
    responses, answered = [], 0
    for row in dump:
        responses.append(row.token_ids_T)
        answered += row.span is not None
        for label in analysis.methods:
            method = row.methods[label]
            if method.neutral is not None:
                neutral[label][method.neutral] = neutral[label].get(method.neutral, 0) + 1
            if (method.weight_T != 1).any():
                unchanged.discard(label)
    if dump.problems:
        raise ValueError(f"{dump.problems[0]}; remove {path.parent} and run the analysis again")
    few = ""
    if any(each.reads_answer for each in analysis.methods.values()) and is_low(answered, len(responses)):
        few = f"{answered} of {len(responses)} responses have an answer in the format {analysis.answer.name}. "
        few += advice(analysis.answer, responses, tokenizer, "--answer")
    return Outcome(path, neutral, [label for label in analysis.methods if label in unchanged], few)


# ----------------------------------------------------------------------------------------------------------------- passes


def _with_model(
    analysis: Analysis,
    rows: Sequence[_Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parts: Path,
    progress: bool,
) -> dict[int, DumpRow]:
    """Log-probabilities, entropies, and what the methods give that use the model; by place."""
    methods = {label: signal for label, signal in analysis.methods.items() if signal.uses}
    together = any(GROUPS in signal.reads or signal.whole_groups for signal in methods.values())
    batches = token_batches(
        [row.length for row in rows], [row.group if together else row.place for row in rows], analysis.batch_tokens
    )
    done: dict[int, DumpRow] = {}
    total = sum(row.length for row in rows)
    with tqdm(total=total, unit=" tokens", disable=None if progress else True) as bar:
        for number, batch in enumerate(batches):
            part = step_path(parts, number)
            if not part.exists():
                computed = _batch(analysis, methods, [rows[place] for place in batch], model, tokenizer)
                write_step(parts, DumpHeader(step=number, method=""), computed)
            bar.update(sum(rows[place].length for place in batch))
        if batches:
            dump = read_dump(parts)
            done = {row.row: replace(row, step=0) for row in dump}
            if dump.problems or len(done) != len(rows):
                broken = f": {dump.problems[0]}" if dump.problems else ""
                raise ValueError(f"{parts} cannot be read{broken}; remove that folder and run the analysis again")
    return done


def _batch(
    analysis: Analysis,
    methods: Mapping[str, Signal],
    rows: Sequence[_Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[DumpRow]:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    tensors = padded([(row.tokens.prompt_P, row.tokens.response_T) for row in rows], pad, model.device)
    log_probs_BL, entropy_BL = response_statistics(model, *tensors, analysis.temperature)
    weights = {
        label: _weights(analysis, signal, rows, model, tokenizer, tensors, log_probs_BL, entropy_BL)
        for label, signal in methods.items()
    }
    response_BL = tensors[2].cpu()
    log_probs_BL, entropy_BL = log_probs_BL.cpu(), entropy_BL.cpu()
    return [
        _dump_row(
            row,
            analysis.answer,
            log_probs_BL[index, response_BL[index]].numpy(),
            entropy_BL[index, response_BL[index]].numpy(),
            {
                label: _method_columns(methods[label], result, row, index, response_BL)
                for label, result in weights.items()
            },
        )
        for index, row in enumerate(rows)
    ]


def _without_model(
    analysis: Analysis,
    rows: Sequence[_Row],
    computed: Mapping[int, DumpRow],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[int, DumpRow]:
    """The methods that use nothing of the model, over all rows at once, and all methods in their order."""
    methods = {label: signal for label, signal in analysis.methods.items() if not signal.uses}
    weights: dict[str, TokenWeights] = {}
    response_BL = torch.zeros(0)
    if methods:
        # The prompt plays no part; one token of it is as good as all.
        tensors = padded([(row.tokens.prompt_P[-1:], row.tokens.response_T) for row in rows], 0, "cpu")
        response_BL = tensors[2]
        log_probs_BL, entropy_BL = torch.zeros(response_BL.shape), torch.zeros(response_BL.shape)
        for place, row in enumerate(rows):
            log_probs_BL[place, response_BL[place]] = torch.from_numpy(computed[row.place].old_log_prob_T)
            entropy_BL[place, response_BL[place]] = torch.from_numpy(computed[row.place].entropy_T)
        for label, signal in methods.items():
            weights[label] = _weights(analysis, signal, rows, model, tokenizer, tensors, log_probs_BL, entropy_BL)
    result = {}
    for row in rows:
        of_row = dict(computed[row.place].methods)
        for label, of_method in weights.items():
            of_row[label] = _method_columns(methods[label], of_method, row, row.place, response_BL)
        result[row.place] = replace(computed[row.place], methods={label: of_row[label] for label in analysis.methods})
    return result


def _weights(
    analysis: Analysis,
    signal: Signal,
    rows: Sequence[_Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    log_probs_BL: torch.Tensor,
    entropy_BL: torch.Tensor,
) -> TokenWeights:
    examples = None
    if EXAMPLES in signal.reads:
        examples = [example_of(row.response, analysis.template_options) for row in rows]
    return compute_token_weights(
        model,
        tokenizer,
        *tensors,
        torch.tensor([row.advantage for row in rows]),
        signal,
        temperature=analysis.temperature,
        old_log_probs=log_probs_BL,
        entropy=entropy_BL,
        groups=torch.tensor([row.group for row in rows]),
        examples=examples,
        fields={name: [row.response.columns.get(name) for row in rows] for name in field_names(signal.reads)},
        answer=analysis.answer,
    )


def _method_columns(
    signal: Signal, weights: TokenWeights, row: _Row, index: int, response_BL: torch.Tensor
) -> MethodColumns:
    inside_L, at = response_BL[index], slice(index, index + 1)
    (neutral,) = neutral_reasons(
        signal,
        weights.rows.part(at),
        valid_B=response_BL[at].any(dim=1),
        advantages_B=torch.tensor([row.advantage]),
        truncated_B=torch.zeros(1),
        non_finite_B=weights.non_finite[at],
    )
    score_T = weights.scores[index].cpu()[inside_L].numpy()
    return MethodColumns(
        score_T=score_T,
        weight_T=weights.weights[index].cpu()[inside_L].numpy(),
        neutral=neutral,
        advantage_T=weights.advantages[index].cpu()[inside_L].numpy() if signal.gives == "advantages" else None,
    )
