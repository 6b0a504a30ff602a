"""The analysis: weights of given responses by several methods, as a token dump.

Every method goes through :func:`grail_advantage.pipeline.weigh` with all responses as one batch. Log-probabilities and
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
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS, outcome_of
from grail_advantage.dump.store import write_step
from grail_advantage.dump_writer import step_header
from grail_advantage.pipeline import weigh
from grail_advantage.record import Rollouts
from grail_advantage.token_weights import PlainHost
from grail_advantage.view.analysis.analysis import Analysis
from grail_advantage.view.analysis.responses import example_of, tokenize


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
    columns_BT = PlainHost(model, rollouts, **settings).columns((OLD_LOG_PROBS, ENTROPY))
    host = PlainHost(model, replace(rollouts, columns_BT=columns_BT), **settings)
    records = {label: weigh(host, signal) for label, signal in analysis.methods.items()}
    first = next(iter(records.values()))
    header = step_header(
        first, texts, step=0, model=analysis.model, temperature=analysis.temperature, rows_in_step=len(rollouts)
    )
    read = any(signal.reads_answer for signal in analysis.methods.values())
    header = replace(header, answer=analysis.answer.name if read else None)
    path = write_step(folder, header, first.table(texts, records))

    no_scores = {label: Counter(filter(None, record.no_scores)) for label, record in records.items()}
    unchanged = [
        label
        for label, record in records.items()
        if record.signal.gives == "weights" and (record.weights_BT[rollouts.mask_BT] == 1).all()
    ]
    spans = rollouts.spans(first.signal.span)
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
        mask_BT=torch.arange(int(lengths_B1.max())) < lengths_B1,
        advantages_B=torch.tensor(advantages),
        tokenizer=tokenizer,
        answer=analysis.answer,
        groups_B=torch.tensor(
            # Without a group, responses with one prompt are shown together.
            [
                numbers.setdefault(f"prompt {row.prompt!r}" if row.group is None else row.group, len(numbers))
                for row in given
            ]
        ),
        rewards_B=torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float64),
        examples=[None if isinstance(row.prompt, str) else example_of(row, analysis.template_options) for row in given],
        fields={
            name: [row.columns.get(name) for row in given]
            for signal in analysis.methods.values()
            for name in signal.field_names
        },
        keys=[row.id for row in given],
        facts={
            "id": [row.id for row in given],
            "prompt": [of_row.prompt for of_row in tokens],
            "ground_truth": [None if row.ground_truth is None else str(row.ground_truth) for row in given],
            "reward": rewards,
            "outcome": [outcome_of(reward) for reward in rewards],
            "labels": [
                token_ranges(row.labels, texts(of_row.response_T)) for row, of_row in zip(given, tokens, strict=True)
            ],
        },
    )


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
