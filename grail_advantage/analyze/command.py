"""``python -m grail_advantage.analyze``: token weights of existing responses by several methods, as a token dump.

A line has ``prompt`` (a text as the model saw it, or a list of messages for the chat template) and ``response`` (a text,
or the generated token ids) or ``steps`` (texts, which blank lines join; beside a ``response`` its parts), and may have
``reward``, ``ground_truth``, ``group`` and ``id``, and for the chat template ``tools`` and ``chat_template_kwargs``; if
the last message is the assistant's, the response continues it. With ``error`` it is labelled: the first incorrect step
from 0 (without ``steps``, lines with text are the steps), the half-open range ``[start, end]`` of its characters in the
response, or null for none. ``values`` are those of ``python -m bench values``. Other keys are columns that a method may
ask for.

About 32 responses are one batch for each method, and one file. The same command resumes after the last file. A method
that raises costs its own columns. Shape suffixes: P tokens of a prompt, T response tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import runpy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from grail_advantage.analyze.lines import Response, read_responses
from grail_advantage.analyze.methods import methods_for
from grail_advantage.analyze.models import ANOTHER, PACKAGED, check_fits, check_options, digest, files_digest, model_of
from grail_advantage.analyze.tokens import labels_of, tokenize, with_messages
from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import advice, is_low
from grail_advantage.answers.text import TokenTexts
from grail_advantage.api import MOST_UNKNOWN, PlainHost
from grail_advantage.data import OF_POLICY, OLD_LOG_PROBS, REF_LOG_PROBS, Example, Rollouts, outcome_of
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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PER_FILE = 32
RECORD = "analysis.json"  # which analysis a folder is of, and the methods that failed
ROUNDED = 2**-22  # relative distance of rewards that are equal in float32 but for the rounding of a sum


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; SystemExit with a message for everything that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.analyze", description=__doc__)
    add = parser.add_argument
    kinds = (
        "lines with prompt, response or steps, ... (docs/report.md), verl's STEP.jsonl, or TRL's completions_*.parquet"
    )
    add("responses", type=Path, metavar="FILE", help=kinds)
    add("--model", required=True, help=f"folder or name of a causal language model; packaged: {', '.join(PACKAGED)}")
    add("--after", help="a later checkpoint of --model: how it changed each token's log-probability, as effect")
    add("--reference", help="the model of reference log-probabilities, for methods that read them")
    add("--method", action="append", required=True, help="NAME[:option=value,...], again for more; all: that fit")
    add("--out", type=Path, default=Path("analysis"), help="folder for the results (default: %(default)s)")
    add("--import", dest="files", action="append", default=[], type=Path, help="a Python file that registers a method")
    auto = "auto: from reward or ground_truth; wrong without these, and where lines are labelled (error)"
    add("--advantages", choices=("auto", "rewards", "wrong", "right"), default="auto", help=auto)
    add("--answer", default=BOXED.name, help="boxed, hashes, tag, or an expression with (?P<content>...); empty: none")
    add("--temperature", type=float, default=1.0, help="of the sampling (default: %(default)s)")
    add("--tokens", type=int, default=FORWARD_TOKENS, help="most of a forward pass, padding counted")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch's name (default: %(default)s)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the model")
    options = parser.parse_args(arguments)
    try:
        check_options(options.temperature, options.tokens, options.device)
        for file in options.files:
            runpy.run_path(str(file), run_name=file.stem)
        responses = read_responses(options.responses)
        answer = answer_format(options.answer or BOXED)
        chosen = methods_for(options.method, responses, options.advantages, bool(options.reference))
        tokenizer, load = model_of(options.model, options.device, options.dtype)
        responses = [with_messages(row, tokenizer) for row in responses]
        decoded = sum(row.decoded for row in responses)
        if decoded:
            lost = f"{decoded} prompts are read without their control tokens, which verl did not write"
            complain("analyze", f"{lost}: the chat template of --model does not make these texts")
        settings = {"temperature": options.temperature, "tokens": options.tokens, "advantages": options.advantages}
        settings |= {"model": options.model, "answer": answer}
        named = (options.model, options.after, options.reference, *map(str, options.files))
        beside = {name: files_digest(name) for name in named if name}
        settings["beside"] = {"dtype": options.dtype, "files": beside}
        for other in ("after", "reference"):
            name = getattr(options, other)
            if name:
                settings[other] = name, model_of(name, options.device, options.dtype)[1]
        say(*analyze(with_rewards(responses, tokenizer), chosen, options.out, tokenizer, load, **settings))
    except (ValueError, OSError) as error:
        raise SystemExit(visible(f"analyze: {error}", breaks=False)) from error
    labelled = any(row.labelled or "values" in row.columns for row in responses)
    table = f"; python -m bench {options.out}" if labelled else ""
    say(f"see it: python -m grail_advantage.report {options.out}{table}")


def analyze(
    responses: Sequence[Response],
    chosen: Mapping[str, BaseMethod],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    load: Callable[[], PreTrainedModel],
    *,
    model: str,
    temperature: float = 1.0,
    tokens: int = FORWARD_TOKENS,
    advantages: str = "auto",
    answer: AnswerFormat = BOXED,
    after: tuple[str, Callable[[], PreTrainedModel]] | None = None,
    reference: tuple[str, Callable[[], PreTrainedModel]] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write the files ``step_000000.parquet``, ... that a folder lacks, new or of the same analysis; returns lines that say
    what there is. ``chosen``: methods by the names of their columns. ``load`` gives the model on its device, and is not
    called where no file is missing. ``advantages``: see :func:`advantages_of`. Names and loaders: ``after`` of a later
    checkpoint, for the column ``effect``, and ``reference`` of the model of reference log-probabilities. ``beside``: what
    else changes the figures, by name, such as the files of the model. ValueError: the folder holds something else, a
    response cannot be read, or all methods failed."""
    values, source = advantages_of(responses, advantages)
    complain("analyze", f"{len(responses)} responses; advantage: {source}")
    about: dict[str, Any] = {
        "model": model,
        "methods": {name: repr(of) for name, of in chosen.items()},
        "answer": answer.name,
    }
    for name, other in (("after", after), ("reference", reference)):
        about[name] = other[0] if other else None
    about.update({"temperature": temperature, **(beside or {})})
    about["responses"] = digest(json.dumps([values, list(map(repr, responses))]))
    about = json.loads(json.dumps(about))
    known: dict[str, Any] = {**about, "failed": {}}
    if folder.exists() and any(folder.iterdir()):
        there = record_in(folder)
        if others := [name for name, value in about.items() if there.get(name) != value]:
            raise ValueError(
                f"{folder} does not hold this analysis: another {', '.join(others)}; name another folder (--out), or "
                "remove this one"
            )
        known = there
    texts = TokenTexts(tokenizer)
    done = set(read_dump(folder).steps)
    loaded = None
    later = None
    referred = None
    whole = _rollouts(responses, values, chosen, tokenizer, texts, answer)
    answered = len(whole) - whole.spans("last").count(None)
    if any(method.reads_answer for method in chosen.values()) and is_low(answered, len(whole)):
        few = f"{answered} of {len(whole)} responses have an answer in the format {answer.name}."
        complain("analyze", f"{few} {advice(answer, whole.responses, tokenizer, '--answer')}")
    for number, part in enumerate(parts_of(responses)):
        if number in done:
            continue
        if loaded is None:
            loaded = load()
            check_fits(loaded, whole)
            write_whole(folder / RECORD, json.dumps(known))
        settings: dict[str, Any] = {"temperature": temperature, "tokens": tokens, "device": loaded.device}
        r, made = replace(whole.part(part), tokenizer=tokenizer), {}
        columns = PlainHost(loaded, r, **settings).columns(OF_POLICY)
        if reference:
            referred = reference[1]() if referred is None else referred
            columns[REF_LOG_PROBS] = PlainHost(referred, r, **settings).columns((OLD_LOG_PROBS,))[OLD_LOG_PROBS]
        if after:
            later = after[1]() if later is None else later
            effect = PlainHost(later, r, **settings).columns((OLD_LOG_PROBS,))[OLD_LOG_PROBS] - columns[OLD_LOG_PROBS]
            pairs = [(key, of[: len(ids)].numpy()) for key, of, ids in zip(r.keys, effect, r.responses, strict=True)]
            table = pa.Table.from_pylist([{"key": key, "effect": of} for key, of in pairs], schema=RECEIVED_SCHEMA)
            write_received(folder, {"step": number, "models": [model, after[0]]}, table)
        r = replace(r, columns=columns)
        for name, method in chosen.items():
            random.seed(number), np.random.seed(number), torch.manual_seed(number)
            own = replace(r.part(range(len(r))), tokenizer=tokenizer, facts={})  # a copy, and nothing of the labels
            try:
                made[name] = replace(weigh(own, method, PlainHost(loaded, own, **settings)), rollouts=r)
            except (Exception, SystemExit) as error:  # the others' results are not lost
                known["failed"][name] = f"{type(error).__name__}: {why(Exception(str(error)))}"
                write_whole(folder / RECORD, json.dumps(known))
                complain("analyze", f"{name} failed, {known['failed'][name]}")
        if not made:
            raise ValueError("every method failed")
        first = next(iter(made.values()))
        header = header_of(first, texts, step=number, model=model, temperature=temperature, rows_in_step=len(r))
        path = write_step(folder, replace(header, answer=answer.name), table_of(first, texts, made))
        complain("analyze", f"written: {path}")
    counts: dict[str, Counter[str | None]] = {name: Counter() for name in chosen}
    changes = {name: np.zeros(3) for name in chosen}
    for row in read_dump(folder):
        content_T: np.ndarray = np.zeros(len(row), dtype=bool)
        if row.span is not None:
            content_T[row.span.content_start : row.span.content_end] = True
        for name, of in row.methods.items():
            counts[name][of.no_scores] += 1
            change_T = np.abs(row.base_advantage_T * (of.weight_T - 1))
            if of.advantage_T is not None:
                change_T = np.abs(of.advantage_T - row.base_advantage_T)
            changes[name] += change_of(change_T, row.base_advantage_T, content_T)
    return [
        f"{name}: {of[None]} of {len(whole)} responses have scores"
        + "".join(f"; {count} without ({reason})" for reason, count in of.items() if reason)
        + change_line(changes[name])
        + (f"; failed, {known['failed'][name]}" if name in known["failed"] else "")
        for name, of in counts.items()
    ]


def change_line(sums: np.ndarray) -> str:
    """What a method's change of the token advantages consists of; empty where it changes none."""
    if not sums.any():
        return ""
    correct, incorrect, scores = change_shares(sums).values()
    return (
        f"; of its change {correct:.0%} is answers' content in correct and {incorrect:.0%} in incorrect responses, "
        f"{scores:.0%} its scores"
    )


def record_in(folder: Path) -> dict[str, Any]:
    """Which analysis a folder is of; empty where it does not say it. ValueError: its record cannot be read."""
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
    """One advantage a response, and where they come from, in words. ``wrong`` and ``right`` are -1 and 1. ``rewards``: the
    reward less its group's mean, exactly 0 in a group of equal rewards; without groups 1 for a reward above 0, else -1.
    ``auto`` is that, or ``wrong`` if lines are labelled or have no reward."""
    rewards, groups = [row.reward for row in responses], dict[str | None, list[float]]()
    if how in ("wrong", "right") or (how == "auto" and (None in rewards or any(row.labelled for row in responses))):
        because = ", as lines are labelled or have no reward" * (how == "auto")
        value = 1.0 if how == "right" else -1.0
        return [value] * len(rewards), f"{value:+.0f} for every response{because}"
    if None in rewards:
        raise ValueError("--advantages rewards needs a reward or a ground_truth in every line")
    known = [float(reward) for reward in rewards if reward is not None]
    if any(row.group is None for row in responses):
        signs = [1.0 if reward > 0 else -1.0 for reward in known]
        return signs, "1 for a reward above 0, else -1, as no line has a group"
    for row, reward in zip(responses, known, strict=True):
        groups.setdefault(row.group, []).append(reward)
    # The mean of equal rewards is off by rounding, whose sign would count as a verdict.
    alike = {group: math.isclose(min(of), max(of), rel_tol=ROUNDED) for group, of in groups.items()}
    pairs = zip((row.group for row in responses), known, strict=True)
    less = [0.0 if alike[of] else reward - float(np.mean(groups[of])) for of, reward in pairs]
    return less, "the reward less its group's mean"


def parts_of(responses: Sequence[Response]) -> list[list[int]]:
    """Which responses are in each file: ``PER_FILE`` in their order, fewer or more where groups stay whole."""
    groups, parts = dict[Any, list[int]](), list[list[int]]([[]])
    for place, row in enumerate(responses):
        groups.setdefault(place if row.group is None else row.group, []).append(place)
    for group in groups.values():
        if parts[-1] and len(parts[-1]) + len(group) > PER_FILE:
            parts.append([])
        parts[-1] += group
    return parts


def _rollouts(
    given: Sequence[Response],
    advantages: Sequence[float],
    chosen: Mapping[str, BaseMethod],
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenTexts,
    answer: AnswerFormat,
) -> Rollouts:
    prompts, prompt_ids, ids = zip(*(tokenize(row, tokenizer) for row in given), strict=True)
    unknown = [sum(token >= len(tokenizer) for token in of_response) for of_response in ids]
    if sum(unknown) > MOST_UNKNOWN * sum(map(len, ids)):
        first = given[next(index for index, count in enumerate(unknown) if count)]
        known = f"not in the tokenizer's vocabulary of {len(tokenizer)}"
        raise ValueError(f"{first.id}: token id {max(first.response)} is {known}, as many in the file; {ANOTHER}")
    lengths_B1, groups = torch.tensor([[len(of)] for of in ids]), dict[Any, int]()
    rewards, names = [row.reward for row in given], [row.id for row in given]
    truths = [None if row.ground_truth is None else str(row.ground_truth) for row in given]
    labels = [labels_of(*pair, tokenizer, texts) for pair in zip(given, ids, strict=True)]
    for row, label in zip(given, labels, strict=True):
        if row.columns.get("values"):
            label["values"] = row.columns["values"]
    facts = {"id": names, "prompt": prompts, "ground_truth": truths, "reward": rewards, "labels": labels}
    of_prompt = [f"prompt {row.prompt!r}" if row.group is None else row.group for row in given]  # shown together
    r = Rollouts(
        prompts=[torch.tensor(of, dtype=torch.int64) for of in prompt_ids],
        responses=[torch.tensor(of, dtype=torch.int64) for of in ids],
        mask=torch.arange(int(lengths_B1.max())) < lengths_B1,
        advantages=torch.tensor(advantages),
        tokenizer=tokenizer,
        answer=answer,
        groups=torch.tensor([groups.setdefault(name, len(groups)) for name in of_prompt]),
        rewards=torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float64),
        examples=[_example(row) for row in given],
        fields={name: [row.columns.get(name) for row in given] for of in chosen.values() for name in of.field_names},
        keys=names,
        facts={**facts, "outcome": [outcome_of(reward) for reward in rewards]},
    )
    for of, span in zip(labels, r.spans("first"), strict=True):
        of |= {"answer": [span.start, span.end]} if of and span else {}
    return r


def with_rewards(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase) -> list[Response]:
    """The responses, those with a ground truth and no reward scored by :mod:`grail_advantage.reward`."""
    scored = []
    for row in responses:
        if row.reward is None and row.ground_truth is not None:
            try:
                from grail_advantage.reward import compute_score
            except ImportError as error:
                raise ValueError(f"ground_truth: {error}; install it, or give each line a reward") from error
            ids = row.response
            text = ids if isinstance(ids, str) else tokenizer.decode(list(ids), skip_special_tokens=True)
            row = replace(row, reward=compute_score("", text, row.ground_truth)["score"])
        scored.append(row)
    return scored


def _example(row: Response) -> Example | None:
    """The response for methods that ask the prompt again, with the ground truth where verl's data sets have it."""
    truth = {} if row.ground_truth is None else {"reward_model": {"ground_truth": row.ground_truth}}
    return None if isinstance(row.prompt, str) else Example(row.prompt, {**row.columns, **truth}, row.template)
