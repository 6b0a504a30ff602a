"""The analysis: weights of given responses by several methods, as a token dump.

Every method goes through :func:`grail_advantage.weigh.weigh` with all responses as one batch. Log-probabilities and
entropies are computed once and handed to all.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage.answers.missing import advice, is_low
from grail_advantage.answers.text import TokenTexts
from grail_advantage.api import PlainHost
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts, outcome_of
from grail_advantage.dump import header_of, write_step
from grail_advantage.view.analysis.analysis import Analysis
from grail_advantage.view.analysis.responses import example_of, tokenize
from grail_advantage.weigh import weigh


@dataclass(frozen=True)
class AnalysisResult:
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
) -> AnalysisResult:
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
    texts = TokenTexts(tokenizer)
    rollouts, model = _rollouts(analysis, tokenizer, texts), load_model()

    settings: dict[str, Any] = {"temperature": analysis.temperature, "tokens": analysis.tokens, "device": model.device}
    columns = PlainHost(model, rollouts, **settings).columns((OLD_LOG_PROBS, ENTROPY))
    host = PlainHost(model, replace(rollouts, columns=columns), **settings)
    records = {label: weigh(host, method, None) for label, method in analysis.methods.items()}
    first = next(iter(records.values()))
    header = header_of(
        first, texts, step=0, model=analysis.model, temperature=analysis.temperature, rows_in_step=len(rollouts)
    )
    read = any(method.reads_answer for method in analysis.methods.values())
    header = replace(header, answer=analysis.answer.name if read else None)
    path = write_step(folder, header, first.table(texts, records))

    no_scores = {label: Counter(filter(None, record.no_scores)) for label, record in records.items()}
    unchanged = [
        label
        for label, record in records.items()
        if record.method.gives == "weights" and (record.weights[rollouts.mask] == 1).all()
    ]
    spans = rollouts.spans(first.method.span)
    answered, few = sum(span is not None for span in spans), ""
    if read and is_low(answered, len(spans)):
        few = f"{answered} of {len(spans)} responses have an answer in the format {analysis.answer.name}. "
        few += advice(analysis.answer, rollouts.responses, tokenizer, "--answer")
    return AnalysisResult(path, no_scores, unchanged, few)


def _rollouts(analysis: Analysis, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> Rollouts:
    given, (advantages, _) = analysis.responses, analysis.row_advantages()
    tokens = [tokenize(row, tokenizer, analysis.template_options) for row in given]
    responses = [torch.tensor(of_row.response_T, dtype=torch.int64) for of_row in tokens]
    lengths_B1 = torch.tensor([[len(response_T)] for response_T in responses])
    numbers: dict[str, int] = {}
    rewards = [row.reward for row in given]
    return Rollouts(
        prompts=[torch.tensor(of_row.prompt_P, dtype=torch.int64) for of_row in tokens],
        responses=responses,
        mask=torch.arange(int(lengths_B1.max())) < lengths_B1,
        advantages=torch.tensor(advantages),
        tokenizer=tokenizer,
        answer=analysis.answer,
        groups=torch.tensor(
            # Without a group, responses with one prompt are shown together.
            [
                numbers.setdefault(f"prompt {row.prompt!r}" if row.group is None else row.group, len(numbers))
                for row in given
            ]
        ),
        rewards=torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float64),
        examples=[None if isinstance(row.prompt, str) else example_of(row, analysis.template_options) for row in given],
        fields={
            name: [row.columns.get(name) for row in given]
            for method in analysis.methods.values()
            for name in method.field_names
        },
        keys=[row.id for row in given],
        facts={
            "id": [row.id for row in given],
            "prompt": [of_row.prompt for of_row in tokens],
            "ground_truth": [None if row.ground_truth is None else str(row.ground_truth) for row in given],
            "reward": rewards,
            "outcome": [outcome_of(reward) for reward in rewards],
            "labels": [
                label_ranges(row.labels, row.response, of_row.response_T, tokenizer, texts)
                for row, of_row in zip(given, tokens, strict=True)
            ],
        },
    )


def label_ranges(
    labels: Mapping[str, Any],
    response: str | Sequence[int],
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenTexts,
) -> dict[str, Any]:
    """Ranges of characters of a response as ranges of its tokens.

    The tokens' texts are not always the response's: SentencePiece puts a space in front, decoding takes spaces out, a
    normalizer writes other characters, a special token in the text has none.

    Args:
        labels: as for :func:`token_ranges`.
        response: the text, or the ids, whose text is as the tokenizer decodes it without special tokens.
        ids: the response's.
        tokenizer: that gave the ids.
        texts: of the tokenizer's tokens.
    """
    if not labels:
        return {}
    text = response if isinstance(response, str) else tokenizer.decode(ids, skip_special_tokens=True)
    spans: Sequence[tuple[int, int]] | None = texts.spans_in(text, ids)
    if spans is None and isinstance(response, str):
        offsets = tokenizer(response, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        # A space that the tokenizer puts in front has the place of the character after it.
        spans = [
            (start, start if token.isspace() and not text[start:end].isspace() else end)
            for token, (start, end) in zip(texts(ids), offsets, strict=True)
        ]
    if spans is None:
        return token_ranges(labels, texts(ids))
    return token_ranges(labels, [text[start:end] for start, end in spans], spans)


def token_ranges(
    labels: Mapping[str, Any], texts: Sequence[str], spans: Sequence[tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Ranges of characters as ranges of tokens: a token belongs where its first character is that is no blank.

    Example: of the tokens ``"= "``, ``" 8"``, ``"."`` in ``"=  8."`` the range (3, 4) has the second.

    Args:
        labels: half-open ranges, or lists of them, by name.
        texts: of the tokens.
        spans: where the texts stand in that in which the characters are counted. A range that begins and ends within one token
            then has this token. Without them the text is the tokens' joined, and such a range is empty.
    """
    ends_T = np.cumsum([len(text) for text in texts]) if spans is None else np.array([end for _, end in spans])
    starts_T = ends_T - [len(text) for text in texts]
    blanks_T = np.array([len(text) - len(text.lstrip()) if text.strip() else 0 for text in texts])
    # A token without text is where the next one is, and belongs to what is before it.
    keys_T = starts_T + blanks_T - 0.5 * np.array([not text for text in texts], dtype=bool)

    def convert(ranges: Any) -> Any:
        if not ranges or isinstance(ranges[0], Sequence):
            return [convert(entry) for entry in ranges]
        start, end = (int(np.searchsorted(keys_T, edge)) for edge in ranges)
        holds_T = (starts_T <= ranges[0]) & (ranges[1] <= ends_T)
        if spans is not None and start == end and ranges[0] < ranges[1] and holds_T.any():
            start = int(holds_T.argmax())
            end = start + 1
        return [start, end]

    return {name: convert(ranges) for name, ranges in labels.items()}
