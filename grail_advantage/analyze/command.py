"""What ``python -m grail_advantage.analyze`` does with its options (:mod:`grail_advantage.analyze.__main__`).

About 32 responses are one batch for each method, and one file. The same command resumes after the last file. A method
that raises costs its own columns. Shape suffixes: P tokens of a prompt, T response tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from grail_advantage.analyze.lines import Response, read_responses
from grail_advantage.analyze.methods import methods_for
from grail_advantage.analyze.models import (
    ANOTHER,
    check_fits,
    check_options,
    digest,
    files_digest,
    model_of,
)
from grail_advantage.analyze.tokens import labels_of, tokenize, with_messages
from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import advice, found_elsewhere, is_low
from grail_advantage.answers.text import TokenTexts
from grail_advantage.api import MOST_UNKNOWN, PlainHost
from grail_advantage.data import (
    OF_POLICY,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    Example,
    Rollouts,
    outcome_of,
)
from grail_advantage.dump import (
    RECEIVED_SCHEMA,
    header_of,
    read_dump,
    table_of,
    write_received,
    write_step,
    write_whole,
)
from grail_advantage.method import BaseMethod
from grail_advantage.metrics import change_of, change_shares
from grail_advantage.model.hooks import FORWARD_TOKENS
from grail_advantage.text_io import complain, read_bytes, read_json, say, visible, why
from grail_advantage.weigh import weigh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.analyze.models import Loadable

PER_FILE = 32
VERDICTS = {"wrong": -1.0, "right": 1.0}  # advantages of all responses, by --advantages
RECORD = "analysis.json"  # which analysis a folder is of, and the methods that failed
# Relative distance of rewards that are equal in float32 but for the rounding of a sum
ROUNDED = 2**-22


def run(options: argparse.Namespace) -> None:
    """Run the command; SystemExit with a message for everything that the user can fix."""
    device = options.device
    if device is None:  # an empty name is refused
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # 0 is refused.
    tokens = FORWARD_TOKENS if options.tokens is None else options.tokens
    try:
        check_options(options.temperature, tokens, device)
        # Before the methods are looked up, some of which these files register.
        for file in options.files:
            runpy.run_path(str(file), run_name=file.stem)
        responses = read_responses(options.responses)
        answer = answer_format(options.answer or BOXED)
        chosen = methods_for(options.method, responses, options.advantages, bool(options.reference))
        names = (options.model, options.after, options.reference)
        models = {name: model_of(name, device, options.dtype) for name in names if name}
        tokenizer, _ = models[options.model]
        responses = [with_messages(row, tokenizer) for row in responses]
        decoded = sum(row.decoded for row in responses)
        if decoded:
            complain(
                "analyze",
                f"{decoded} prompts are read without their control tokens, which verl did not write: the chat template of "
                "--model does not make these texts",
            )
        sources = [*models, *map(str, options.files)]
        lines = analyze(
            with_rewards(responses, tokenizer),
            chosen,
            options.out,
            models,
            model=options.model,
            later=options.after,
            reference=options.reference,
            temperature=options.temperature,
            tokens=tokens,
            advantages=options.advantages,
            answer=answer,
            provenance={
                "dtype": options.dtype,
                "files": {name: files_digest(name) for name in sources},
            },
        )
        say(*lines)
    except (ValueError, OSError) as error:
        raise SystemExit(visible(f"analyze: {error}")) from error
    table = ""
    if any(row.labelled or "values" in row.columns for row in responses):
        table = f"; python -m bench {options.out}"
    say(f"see it: python -m grail_advantage.report {options.out}{table}")


def analyze(
    responses: Sequence[Response],
    chosen: Mapping[str, BaseMethod],
    folder: Path,
    models: Mapping[str, Loadable],
    *,
    model: str,
    later: str | None = None,
    reference: str | None = None,
    temperature: float = 1.0,
    tokens: int = FORWARD_TOKENS,
    advantages: str = "auto",
    answer: AnswerFormat = BOXED,
    provenance: Mapping[str, Any] = {},
) -> list[str]:
    """Write the files ``step_000000.parquet``, ... that a folder lacks, new or of the same analysis; returns lines that
    say what there is.

    Args:
        responses: with their rewards.
        chosen: methods by the names of their columns.
        folder: new, or with an analysis of the same.
        models: by name a tokenizer and a function that loads the model on its device, which is not called where no file
            is missing.
        model: the name of the one that generated the responses.
        later: that of a later checkpoint, for the column ``effect``.
        reference: that of the model of reference log-probabilities.
        temperature: of the sampling.
        tokens: most of a forward pass.
        advantages: see :func:`advantages_of`.
        answer: the format of answers.
        provenance: what else changes the figures, by name, such as the files of the model.

    Raises:
        ValueError: the folder holds something else, a response cannot be read, or all methods failed.
    """
    tokenizer, load = models[model]
    values, source = advantages_of(responses, advantages)
    complain("analyze", f"{len(responses)} responses; advantage: {source}")
    about = {
        "model": model,
        # With all options, so that another default is another analysis.
        "methods": {name: repr(method) for name, method in chosen.items()},
        "answer": answer.name,
        "after": later,
        "reference": reference,
        "temperature": temperature,
        **provenance,
        "responses": digest(json.dumps([values, list(map(repr, responses))])),
    }
    record = _record_for(folder, about)
    texts = TokenTexts(tokenizer)
    rollouts = _rollouts(responses, values, chosen, tokenizer, texts, answer)
    answered = len(rollouts) - rollouts.spans("last").count(None)
    # Where all have an answer no other format finds more.
    if (
        answered < len(rollouts)
        and any(method.reads_answer for method in chosen.values())
        and (
            is_low(answered, len(rollouts))
            or found_elsewhere(answer, rollouts.responses, tokenizer)
        )
    ):
        share = f"{answered} of {len(rollouts)} responses have an answer in the format"
        remedy = advice(answer, rollouts.responses, tokenizer, "--answer")
        complain("analyze", f"{share} {answer.name}. {remedy}")
    written = read_dump(folder).steps
    parts = {
        number: part for number, part in enumerate(parts_of(responses)) if number not in written
    }
    # No model is loaded for an analysis that is complete.
    if parts:
        # Not above: who reads the record of an analysis does not need it.
        from transformers import set_seed

        loaded = load()
        # Before the first file, so that responses of another model leave no folder behind.
        check_fits(loaded, rollouts)
        write_whole(folder / RECORD, json.dumps(record))
        host = partial(PlainHost, temperature=temperature, tokens=tokens, device=loaded.device)
        later_model = later and models[later][1]()
        reference_model = reference and models[reference][1]()
    for number, part in parts.items():
        r = replace(rollouts.part(part), tokenizer=tokenizer)
        columns = host(loaded, r).columns(OF_POLICY)
        if reference_model:
            reference_columns = host(reference_model, r).columns((OLD_LOG_PROBS,))
            columns[REF_LOG_PROBS] = reference_columns[OLD_LOG_PROBS]
        if later_model:
            later_columns = host(later_model, r).columns((OLD_LOG_PROBS,))
            effect_BT = later_columns[OLD_LOG_PROBS] - columns[OLD_LOG_PROBS]
            effects = [
                {"key": key, "effect": effect_T[: len(ids)].numpy()}
                for key, effect_T, ids in zip(r.keys, effect_BT, r.responses, strict=True)
            ]
            table = pa.Table.from_pylist(effects, schema=RECEIVED_SCHEMA)
            write_received(folder, {"step": number, "models": [model, later]}, table)
        r = replace(r, columns=columns)
        weighed = {}
        for name, method in chosen.items():
            # A method may draw random numbers; a file that is written again has the same ones.
            set_seed(number)
            # Copies, so that a method that writes into its tensors changes nothing for the next; without the labels.
            copies = replace(r.part(range(len(r))), tokenizer=tokenizer, facts={})
            try:
                result = weigh(copies, method, host(loaded, copies))
            except (Exception, SystemExit) as error:
                # The results of the other methods are not lost.
                record["failed"][name] = f"{type(error).__name__}: {why(Exception(str(error)))}"
                write_whole(folder / RECORD, json.dumps(record))
                complain("analyze", f"{name} failed, {record['failed'][name]}")
            else:
                # The dump shows the labels, which the method did not see.
                weighed[name] = replace(result, rollouts=r)
        if not weighed:
            raise ValueError("every method failed")
        first = next(iter(weighed.values()))
        header = header_of(
            first, texts, step=number, model=model, temperature=temperature, rows_in_step=len(r)
        )
        path = write_step(
            folder, replace(header, answer=answer.name), table_of(first, texts, weighed)
        )
        complain("analyze", f"written: {path}")
    return _summary(folder, chosen, len(rollouts), record["failed"])


def _record_for(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Give the record of a folder that is of this analysis, or of a new one; ValueError for a folder of something
    else."""
    if not folder.exists() or not any(folder.iterdir()):
        return {**about, "failed": {}}
    record = record_in(folder)
    differing = [name for name, value in about.items() if record.get(name) != value]
    if differing:
        raise ValueError(
            f"{folder} does not hold this analysis: another {', '.join(differing)}; name another folder (--out), or "
            "remove this one"
        )
    return record


def _summary(
    folder: Path, chosen: Mapping[str, BaseMethod], count: int, failed: Mapping[str, str]
) -> list[str]:
    """Give a line for each method: how many of ``count`` responses have scores, and why the others have none."""
    reasons: dict[str, Counter[str | None]] = {name: Counter() for name in chosen}
    changes = {name: np.zeros(3) for name in chosen}
    for row in read_dump(folder):
        content_T: np.ndarray = np.zeros(len(row), dtype=bool)
        if row.span is not None:
            content_T[row.span.content_start : row.span.content_end] = True
        for name, columns in row.methods.items():
            reasons[name][columns.no_scores] += 1
            # A method that gives weights has no advantages of its own in a dump.
            if columns.advantage_T is None:
                change_T = np.abs(row.base_advantage_T * (columns.weight_T - 1))
            else:
                change_T = np.abs(columns.advantage_T - row.base_advantage_T)
            changes[name] += change_of(change_T, row.base_advantage_T, content_T)
    lines = []
    for name, counts in reasons.items():
        scored = counts.pop(None, 0)
        line = f"{name}: {scored} of {count} responses have scores"
        for reason, without in counts.items():
            line += f"; {without} without ({reason})"
        if changes[name].any():
            correct, incorrect, scores = change_shares(changes[name]).values()
            line += (
                f"; of its change {correct:.0%} is answers' content in correct and {incorrect:.0%} in incorrect responses, "
                f"{scores:.0%} its scores"
            )
        if name in failed:
            line += f"; failed, {failed[name]}"
        lines.append(line)
    return lines


def record_in(folder: Path) -> dict[str, Any]:
    """Say which analysis a folder is of; empty where it does not say it. ValueError: its record cannot be read."""
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        record = read_json(read_bytes(path))
        if not isinstance(record, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({why(error)})") from error
    return record


def advantages_of(responses: Sequence[Response], how: str) -> tuple[list[float], str]:
    """Give one advantage a response, and where they come from, in words. ``wrong`` and ``right`` are -1 and 1.
    ``rewards``: the reward less its group's mean, exactly 0 in a group of equal rewards; without groups 1 for a reward
    above 0, else -1. ``auto`` is that, or ``wrong`` if lines are labelled or have no reward."""
    rewards = [row.reward for row in responses if row.reward is not None]
    lacks_rewards = len(rewards) < len(responses)
    because = ""
    if how == "auto" and (lacks_rewards or any(row.labelled for row in responses)):
        how = "wrong"
        because = ", as lines are labelled or have no reward"
    if how in VERDICTS:
        verdict = VERDICTS[how]
        return [verdict] * len(responses), f"{verdict:+.0f} for every response{because}"
    if lacks_rewards:
        raise ValueError("--advantages rewards needs a reward or a ground_truth in every line")
    if any(row.group is None for row in responses):
        signs = [1.0 if reward > 0 else -1.0 for reward in rewards]
        return signs, "1 for a reward above 0, else -1, as no line has a group"
    groups: dict[str | None, list[float]] = {}
    for row, reward in zip(responses, rewards, strict=True):
        groups.setdefault(row.group, []).append(reward)
    advantages = []
    for row, reward in zip(responses, rewards, strict=True):
        group = groups[row.group]
        # The mean of equal rewards is off by rounding, whose sign would count as a verdict.
        is_even = math.isclose(min(group), max(group), rel_tol=ROUNDED)
        advantage = reward - float(np.mean(group))
        advantages.append(0.0 if is_even else advantage)
    return advantages, "the reward less its group's mean"


def parts_of(responses: Sequence[Response]) -> list[list[int]]:
    """Say which responses are in each file: ``PER_FILE`` in their order, fewer or more where groups stay whole."""
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(responses):
        # A group is a text, so that no number is mistaken for one.
        groups.setdefault(index if row.group is None else row.group, []).append(index)
    parts: list[list[int]] = [[]]
    for group in groups.values():
        if parts[-1] and len(parts[-1]) + len(group) > PER_FILE:
            parts.append([])
        parts[-1] += group
    return parts


def _rollouts(
    responses: Sequence[Response],
    advantages: Sequence[float],
    chosen: Mapping[str, BaseMethod],
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenTexts,
    answer: AnswerFormat,
) -> Rollouts:
    """Give the responses in token space, with their labels; ValueError for ids that the tokenizer does not have."""
    prompts, prompt_ids, ids = zip(*(tokenize(row, tokenizer) for row in responses), strict=True)
    # Once: a large vocabulary takes a while to count.
    vocabulary = len(tokenizer)
    unknown = [sum(token >= vocabulary for token in ids_T) for ids_T in ids]
    if sum(unknown) > MOST_UNKNOWN * sum(map(len, ids)):
        first = next(row for row, count in zip(responses, unknown, strict=True) if count)
        raise ValueError(
            f"{first.id}: token id {max(first.response)} is not in the tokenizer's vocabulary of {vocabulary}, as many in "
            f"the file; {ANOTHER}"
        )
    lengths_B1 = torch.tensor([[len(ids_T)] for ids_T in ids])
    rewards = [row.reward for row in responses]
    names = [row.id for row in responses]
    # Without groups those of one prompt are shown together.
    groups = [f"prompt {row.prompt!r}" if row.group is None else row.group for row in responses]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    field_names = {name for method in chosen.values() for name in method.field_names}
    labels = [
        labels_of(row, ids_T, tokenizer, texts) for row, ids_T in zip(responses, ids, strict=True)
    ]
    r = Rollouts(
        prompts=list(map(torch.tensor, prompt_ids)),
        responses=[torch.tensor(ids_T, dtype=torch.int64) for ids_T in ids],
        mask=torch.arange(int(lengths_B1.max())) < lengths_B1,
        advantages=torch.tensor(advantages),
        tokenizer=tokenizer,
        answer=answer,
        groups=torch.tensor([numbers[group] for group in groups]),
        # NumPy makes a reward that is None NaN.
        rewards=torch.from_numpy(np.array(rewards, dtype=np.float64)),
        examples=[_example(row) for row in responses],
        fields={name: [row.columns.get(name) for row in responses] for name in field_names},
        keys=names,
        facts={
            "id": names,
            "prompt": prompts,
            "ground_truth": [
                None if row.ground_truth is None else str(row.ground_truth) for row in responses
            ],
            "reward": rewards,
            "outcome": list(map(outcome_of, rewards)),
            "labels": labels,
        },
    )
    # The record holds these same dictionaries, and finds the answers that go into them.
    for label, span in zip(labels, r.spans("first"), strict=True):
        if label and span:
            label["answer"] = [span.start, span.end]
    return r


def with_rewards(
    responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase
) -> list[Response]:
    """Give the responses, those with a ground truth and no reward scored by :mod:`grail_advantage.reward`."""
    scored = []
    for row in responses:
        if row.reward is None and row.ground_truth is not None:
            try:
                from grail_advantage.reward import compute_score
            except ImportError as error:
                raise ValueError(
                    f"ground_truth: {error}; install it, or give each line a reward"
                ) from error
            text = row.response
            if not isinstance(text, str):
                text = tokenizer.decode(list(text), skip_special_tokens=True)
            row = replace(row, reward=compute_score("", text, row.ground_truth)["score"])
        scored.append(row)
    return scored


def _example(row: Response) -> Example | None:
    """Give the response for methods that ask the prompt again, with the ground truth where verl's data sets have it."""
    if isinstance(row.prompt, str):
        return None
    columns = dict(row.columns)
    if row.ground_truth is not None:
        columns["reward_model"] = {"ground_truth": row.ground_truth}
    return Example(row.prompt, columns, row.template)
