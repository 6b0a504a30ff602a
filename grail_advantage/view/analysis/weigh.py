"""The analysis: weights of given responses by several methods, as a token dump.

Every method runs through :func:`grail_advantage.compute_token_weights`. Log-probabilities and entropies are computed once and
handed to all. A method that uses nothing of the model sees all responses as one batch; one that does sees the batches of
:func:`.batches.token_batches`, each of some forward passes.

Shape suffixes: B responses, L prompt + response, T response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage import __version__
from grail_advantage.answers.missing import advice, is_low
from grail_advantage.answers.span import AnswerSpan, find_answer_spans
from grail_advantage.answers.text import TokenTexts, answer_text
from grail_advantage.batch import EXAMPLES, GROUPS, REWARDS, outcome_of
from grail_advantage.dump.schema import DumpHeader
from grail_advantage.dump.step import reasons_without_scores, table_of
from grail_advantage.dump.store import DumpRow, MethodColumns, write_step
from grail_advantage.signals.base import Signal
from grail_advantage.token_weights import compute_token_weights, response_statistics
from grail_advantage.view.analysis.analysis import Analysis
from grail_advantage.view.analysis.batches import padded, token_batches
from grail_advantage.view.analysis.responses import Response, Tokens, example_of, tokenize

FORWARDS = 16
"""Forward passes of a batch, approximately: enough responses to sort by length, and one step of the progress bar."""


@dataclass(frozen=True)
class Outcome:
    """The result of :func:`run_analysis`."""

    path: Path
    """The file."""
    no_scores: Mapping[str, Mapping[str, int]]
    """For each method how many responses have no scores, by reason."""
    unchanged: Sequence[str]
    """Methods that gave every token of every response the weight 1."""
    few_answers: str
    """A sentence where so few responses have an answer that something is amiss, with the remedy; empty elsewhere."""


def run_analysis(
    analysis: Analysis,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
) -> Outcome:
    """Compute and write ``folder/step_000000.parquet``.

    Args:
        analysis: what to compute.
        folder: where to; made where it is missing.
        tokenizer: the model's.
        load_model: gives the model, on its device.

    Raises:
        ValueError: the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; name another folder (--out), or remove this one")
    rows = _rows(analysis, tokenizer)
    _weigh(analysis, rows, load_model(), tokenizer)
    path = write_step(folder, _header(analysis, tokenizer), table_of([_dump_row(row, analysis) for row in rows]))
    no_scores = {
        label: Counter(reason for row in rows if (reason := row.methods[label].no_scores) is not None)
        for label in analysis.methods
    }
    unchanged = [
        label
        for label, signal in analysis.methods.items()
        if signal.gives == "weights" and all((row.methods[label].weight_T == 1).all() for row in rows)
    ]
    answered, few = sum(row.span is not None for row in rows), ""
    if any(each.reads_answer for each in analysis.methods.values()) and is_low(answered, len(rows)):
        few = f"{answered} of {len(rows)} responses have an answer in the format {analysis.answer.name}. "
        few += advice(analysis.answer, [np.array(row.tokens.response_T) for row in rows], tokenizer, "--answer")
    return Outcome(path, no_scores, unchanged, few)


@dataclass
class _Row:
    response: Response
    tokens: Tokens
    texts: list[str]
    span: AnswerSpan | None
    advantage: float
    place: int
    group: int
    log_probs_T: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    entropy_T: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    methods: dict[str, MethodColumns] = field(default_factory=dict)

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
        rows.append(_Row(response, tokens, texts(tokens.response_T), span, advantages[place], place, group))
    return rows


def token_ranges(labels: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Ranges of characters as ranges of tokens: a token belongs where its first character is.

    Args:
        labels: half-open ranges, or lists of them, by name.
        texts: of the tokens; joined, the text that the characters are counted in.
    """
    starts_T = np.cumsum([0, *(len(text) for text in texts)])[:-1]
    # A token without text is where the next one is, and belongs to what is before it.
    keys_T = starts_T - 0.5 * np.array([not text for text in texts], dtype=bool)

    def convert(ranges: Any) -> Any:
        if ranges and isinstance(ranges[0], Sequence):
            return [convert(entry) for entry in ranges]
        return [int(np.searchsorted(keys_T, edge)) for edge in ranges]

    return {name: convert(ranges) for name, ranges in labels.items()}


def _dump_row(row: _Row, analysis: Analysis) -> DumpRow:
    """The response with the columns of its first method as its own, and the methods in their order."""
    response, length = row.response, len(row.tokens.response_T)
    methods = {label: row.methods[label] for label in analysis.methods}
    first = next(iter(methods.values()))
    base_advantage_T: np.ndarray = np.full(length, row.advantage, dtype=np.float32)
    return DumpRow(
        step=0,
        row=row.place,
        key=response.id,
        group=row.group,
        id=response.id,
        prompt=row.tokens.prompt,
        response="".join(row.texts),
        ground_truth=None if response.ground_truth is None else str(response.ground_truth),
        reward=response.reward,
        outcome=outcome_of(response.reward),
        answer=answer_text(row.texts, row.span, analysis.answer),
        no_scores=first.no_scores,
        span=row.span,
        prompt_ids=np.array(row.tokens.prompt_P, dtype=np.int64),
        token_ids_T=np.array(row.tokens.response_T, dtype=np.int64),
        tokens=row.texts,
        mask_T=np.ones(length, dtype=bool),
        score_T=first.score_T,
        weight_T=first.weight_T,
        base_advantage_T=base_advantage_T,
        advantage_T=first.weight_T * base_advantage_T if first.advantage_T is None else first.advantage_T,
        old_log_prob_T=row.log_probs_T,
        entropy_T=row.entropy_T,
        methods=methods,
        labels=token_ranges(response.labels, row.texts),
    )


def _header(analysis: Analysis, tokenizer: PreTrainedTokenizerBase) -> DumpHeader:
    signal = next(iter(analysis.methods.values()))
    return DumpHeader(
        step=0,
        method=signal.name,
        options=signal.as_dict(),
        reshaper=getattr(signal, "reshaper", None),
        model=analysis.model,
        temperature=analysis.temperature,
        rows_in_step=len(analysis.responses),
        special_tokens=TokenTexts(tokenizer).special_tokens,
        written_by=f"grail_advantage {__version__}",
        answer=analysis.answer.name if any(each.reads_answer for each in analysis.methods.values()) else None,
    )


def _weigh(
    analysis: Analysis,
    rows: Sequence[_Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Put log-probabilities, entropies and every method's columns into the responses."""
    with_model = {label: signal for label, signal in analysis.methods.items() if signal.uses}
    together = any(GROUPS in signal.reads or signal.whole_groups for signal in with_model.values())
    batches = token_batches(
        [row.length for row in rows], [row.group if together else row.place for row in rows], FORWARDS * analysis.tokens
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    total = sum(row.length for row in rows)
    with tqdm(total=total, unit=" tokens", disable=None) as bar:
        for places in batches:
            batch = [rows[place] for place in places]
            tensors = padded([(row.tokens.prompt_P, row.tokens.response_T) for row in batch], pad, model.device)
            columns = response_statistics(
                model, tokenizer, *tensors, temperature=analysis.temperature, tokens=analysis.tokens
            )
            inside_BL, log_probs_BL, entropy_BL = (values.cpu() for values in (tensors[2], *columns))
            for index, row in enumerate(batch):
                row.log_probs_T = log_probs_BL[index, inside_BL[index]].numpy()
                row.entropy_T = entropy_BL[index, inside_BL[index]].numpy()
            _weigh_batch(analysis, with_model, batch, model, tokenizer, tensors, *columns)
            bar.update(sum(row.length for row in batch))

    without_model = {label: signal for label, signal in analysis.methods.items() if not signal.uses}
    if without_model:
        # The prompt plays no part; one token of it is as good as all.
        tensors = padded([(row.tokens.prompt_P[-1:], row.tokens.response_T) for row in rows], 0, "cpu")
        log_probs_BL, entropy_BL = torch.zeros(2, *tensors[2].shape)
        for index, row in enumerate(rows):
            log_probs_BL[index, tensors[2][index]] = torch.from_numpy(row.log_probs_T)
            entropy_BL[index, tensors[2][index]] = torch.from_numpy(row.entropy_T)
        _weigh_batch(analysis, without_model, rows, model, tokenizer, tensors, log_probs_BL, entropy_BL)


def _weigh_batch(
    analysis: Analysis,
    methods: Mapping[str, Signal],
    rows: Sequence[_Row],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    log_probs_BL: torch.Tensor,
    entropy_BL: torch.Tensor,
) -> None:
    """Put the columns of some methods into the responses of a batch."""
    advantages_B, inside_BL = torch.tensor([row.advantage for row in rows]), tensors[2].cpu()
    for label, signal in methods.items():
        examples = None
        if EXAMPLES in signal.reads:
            examples = [example_of(row.response, analysis.template_options) for row in rows]
        rewards = None
        if REWARDS in signal.reads:
            rewards = torch.tensor([row.response.reward for row in rows], dtype=torch.float64)
        result = compute_token_weights(
            model,
            tokenizer,
            *tensors,
            advantages_B,
            signal,
            temperature=analysis.temperature,
            old_log_probs=log_probs_BL,
            entropy=entropy_BL,
            groups=torch.tensor([row.group for row in rows]),
            examples=examples,
            fields={name: [row.response.columns.get(name) for row in rows] for name in signal.field_names},
            rewards=rewards,
            answer=analysis.answer,
            tokens=analysis.tokens,
        )
        no_scores = reasons_without_scores(
            signal,
            result.rows,
            valid_B=inside_BL.any(dim=1),
            advantages_B=advantages_B,
            truncated_B=torch.zeros(len(rows)),
            non_finite_B=result.non_finite,
        )
        scores_BL, weights_BL, advantages_BL = (
            values.cpu() for values in (result.scores, result.weights, result.advantages)
        )
        for index, row in enumerate(rows):
            inside_L = inside_BL[index]
            row.methods[label] = MethodColumns(
                score_T=scores_BL[index, inside_L].numpy(),
                weight_T=weights_BL[index, inside_L].numpy(),
                no_scores=no_scores[index],
                advantage_T=advantages_BL[index, inside_L].numpy() if signal.gives == "advantages" else None,
            )
