"""``python -m grail_advantage.analyze``: token weights of existing responses by several methods, as a token dump.

A line has ``prompt`` (a text as the model saw it, or a list of messages for the chat template) and ``response`` (a text,
or the generated token ids) or ``steps`` (texts, which blank lines join; beside a ``response`` its parts), and may have
``reward``, ``ground_truth``, ``group`` and ``id``, and for the chat template ``tools`` and ``chat_template_kwargs``; if
the last message is the assistant's, the response continues it. With ``error`` it is labelled: the first incorrect step
from 0 (without ``steps``, lines with text are the steps), the half-open range ``[start, end]`` of its characters in the
response, or null for none. Other keys are columns that a method may ask for.

About 32 responses are one batch for each method, and one file. The same command resumes after the last file. A method
that raises costs its own columns. Shape suffixes: P tokens of a prompt, T response tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import random
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import advice, is_low
from grail_advantage.answers.text import TokenTexts
from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.api import MOST_UNKNOWN, PlainHost
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Example, Rollouts, outcome_of
from grail_advantage.dump import RECEIVED_SCHEMA, header_of, read_dump, write_received, write_step, write_whole
from grail_advantage.method import BaseMethod, build, methods
from grail_advantage.model.hooks import FORWARD_TOKENS
from grail_advantage.receipt.foreign import complain, numbered_lines, read_bytes, read_json, say, visible, why
from grail_advantage.weigh import weigh

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Ranges = list[tuple[int, int]]
KEYS = ("prompt", "response", "steps", "ground_truth", "reward", "group", "id", "error")
SEPARATOR = "\n\n"
PER_FILE = 32
RECORD = "analysis.json"  # which analysis a folder is of, and the methods that failed
PACKAGED = {"smollm2": "verl_cpu.tiny.smollm2:load_smollm2", "tiny": "verl_cpu.tiny.shipped:load_shipped"}
_ANOTHER = "give --model the model that generated the response"
ROUNDED = 2**-22  # relative distance of rewards that are equal in float32 but for the rounding of a sum


@dataclass(frozen=True, kw_only=True)
class Response:
    """One line."""

    id: str
    prompt: str | Sequence[Mapping[str, Any]]
    response: str | Sequence[int]
    steps: Ranges | None = None  # half-open ranges of characters; None: the response's lines are its steps
    labelled: bool = False  # says where the first error is; None then says that there is none
    error: int | tuple[int, int] | None = None
    ground_truth: Any = None
    reward: float | None = None
    group: str | None = None  # the same for responses to one prompt
    template: Mapping[str, Any] = field(default_factory=dict)  # options of the chat template; tools among them
    columns: Mapping[str, Any] = field(default_factory=dict)  # everything else


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; SystemExit with a message for everything that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m grail_advantage.analyze", description=__doc__)
    add = parser.add_argument
    add("responses", type=Path, metavar="FILE.jsonl", help="lines with prompt, response or steps, ...: docs/report.md")
    add("--model", required=True, help=f"folder or name of a causal language model; packaged: {', '.join(PACKAGED)}")
    add("--after", help="a later checkpoint of --model: how it changed each token's log-probability, as effect")
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
        responses, answer = read_responses(options.responses), answer_format(options.answer or BOXED)
        chosen = methods_for(options.method, responses, options.advantages)
        tokenizer, load = model_of(options.model, options.device, options.dtype)
        settings = {"temperature": options.temperature, "tokens": options.tokens, "advantages": options.advantages}
        settings |= {"model": options.model, "answer": answer}
        beside = {name: state_of(name) for name in (options.model, options.after, *map(str, options.files)) if name}
        settings["beside"] = {"dtype": options.dtype, "files": beside}
        if options.after:
            settings["after"] = options.after, model_of(options.after, options.device, options.dtype)[1]
        say(*analyze(with_rewards(responses, tokenizer), chosen, options.out, tokenizer, load, **settings))
    except (ValueError, OSError) as error:
        raise SystemExit(visible(f"analyze: {error}", breaks=False)) from error
    labelled = f"; python -m bench {options.out}" if any(row.labelled for row in responses) else ""
    say(f"see it: python -m grail_advantage.report {options.out}{labelled}")


def check_options(temperature: float, tokens: int, device: str) -> None:
    """ValueError, naming the option, for a number or a device with which no model runs."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"--temperature {temperature} must be a number above 0, that of the sampling")
    if tokens < 1:
        raise ValueError(f"--tokens {tokens} must be at least 1")
    try:
        there = torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's, of a name or of a device that is not there
        raise ValueError(f"--device {device} cannot be used here ({why(Exception(str(error)))}); use cpu") from error
    if there.is_meta:
        raise ValueError(f"--device {device} computes nothing; use cpu")


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
    beside: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write the files ``step_000000.parquet``, ... that a folder lacks, new or of the same analysis; returns lines that say
    what there is. ``chosen``: methods by the names of their columns. ``load`` gives the model on its device, and is not
    called where no file is missing. ``advantages``: see :func:`advantages_of`. ``after``: name and loader of a later
    checkpoint, for the column ``effect``. ``beside``: what else changes the figures, by name, such as the files of the
    model. ValueError: the folder holds something else, a response cannot be read, or all methods failed."""
    values, source = advantages_of(responses, advantages)
    complain("analyze", f"{len(responses)} responses; advantage: {source}")
    about: dict[str, Any] = {
        "model": model,
        "methods": {name: repr(of) for name, of in chosen.items()},
        "answer": answer.name,
    }
    about |= {"after": after[0] if after else None, "temperature": temperature, **(beside or {})}
    about["responses"] = _digest(json.dumps([values, list(map(repr, responses))]))
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
    texts, done, loaded, later = TokenTexts(tokenizer), set(read_dump(folder).steps), None, None
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
        columns = PlainHost(loaded, r, **settings).columns((OLD_LOG_PROBS, ENTROPY))
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
        path = write_step(folder, replace(header, answer=answer.name), first.table(texts, made))
        complain("analyze", f"written: {path}")
    counts: dict[str, Counter[str | None]] = {name: Counter() for name in chosen}
    for row in read_dump(folder):
        for name, of in row.methods.items():
            counts[name][of.no_scores] += 1
    return [
        f"{name}: {of[None]} of {len(whole)} responses have scores"
        + "".join(f"; {count} without ({reason})" for reason, count in of.items() if reason)
        + (f"; failed, {known['failed'][name]}" if name in known["failed"] else "")
        for name, of in counts.items()
    ]


def state_of(name: str) -> str | None:
    """A digest that tells whether the files of a model's folder, or a file, have changed: of their names, sizes and times.
    ``None`` for a name on the hub or a packaged model."""
    path = Path(name)
    if not path.exists():
        return None
    files = sorted(file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    return _digest(repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def check_fits(model: PreTrainedModel, r: Rollouts) -> None:
    """ValueError, naming a response, for token ids or a length that the model does not have."""
    vocabulary = model.get_input_embeddings().num_embeddings
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    for key, prompt, response in zip(r.keys, r.prompts, r.responses, strict=True):
        row = torch.cat([prompt, response])
        if int(row.max()) >= vocabulary:
            raise ValueError(f"{key}: token id {int(row.max())} is not one of the model's {vocabulary}; {_ANOTHER}")
        if len(row) > positions:
            raise ValueError(
                f"{key}: its {len(row)} tokens are more than the model's {positions} positions "
                "(max_position_embeddings); leave the line out"
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


def methods_for(specs: Sequence[str], responses: Sequence[Response], advantages: str = "auto") -> dict[str, BaseMethod]:
    """The methods by how they are called; ``all``: the registered ones that fit, but for those with a pass for every
    token. ValueError: a method that is unknown, named twice, or needs what the lines do not have."""
    every, found = list(specs) == ["all"], dict[str, BaseMethod]()
    for spec in sorted(methods()) if every else specs:
        method = parse_method(spec)
        lack = _lack(method, responses, advantages)
        lack = "takes a pass for every token" if every and "for every" in method.cost else lack
        if spec in found or (lack and not every):
            raise ValueError(f"--method {spec} {lack or 'is given twice; give variants of a method other options'}")
        if lack:
            complain("analyze", f"left out: {spec} {lack}")
        else:
            found[spec] = method
    return found


def _lack(method: BaseMethod, responses: Sequence[Response], advantages: str) -> str:
    """What the lines lack for a method, after its name; empty where it fits."""
    compared = all(row.group is not None and (row.reward, row.ground_truth) != (None, None) for row in responses)
    compared &= advantages == "rewards" or (advantages == "auto" and not any(row.labelled for row in responses))
    if missing := [name for name in method.field_names if all(name not in row.columns for row in responses)]:
        return f"reads the field {missing[0]}, which no line has; give the lines one"
    if "groups" in method.reads and not compared:
        return "compares the responses of one prompt; give each a group and a reward, and --advantages rewards"
    if "examples" in method.reads and any(is_begun(row) for row in responses):
        return "asks again in other words, which a begun answer at the end of a prompt does not allow"
    if "examples" in method.reads and any(isinstance(row.prompt, str) for row in responses):
        return "asks the prompt again with more in it; give the prompts as messages"
    if "examples" in method.reads and all(row.ground_truth is None and not row.columns for row in responses):
        return "tells the model the answer; give the lines a ground_truth, or the column that its options name"
    return ""


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
        raise ValueError(f"{first.id}: token id {max(first.response)} is {known}, as many in the file; {_ANOTHER}")
    lengths_B1, groups = torch.tensor([[len(of)] for of in ids]), dict[Any, int]()
    rewards, names = [row.reward for row in given], [row.id for row in given]
    truths = [None if row.ground_truth is None else str(row.ground_truth) for row in given]
    labels = [labels_of(*pair, tokenizer, texts) for pair in zip(given, ids, strict=True)]
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


def model_of(
    name: str, device: str = "cpu", dtype: str = "auto"
) -> tuple[PreTrainedTokenizerBase, Callable[[], PreTrainedModel]]:
    """A model's tokenizer, and a function that loads the model on its device. ValueError: one cannot be loaded."""
    try:
        if name in PACKAGED:
            module, _, function = PACKAGED[name].partition(":")
            model, tokenizer = getattr(importlib.import_module(module), function)()
            model = model if dtype == "auto" else model.to(getattr(torch, dtype))
            return tokenizer, lambda: model.to(device).eval()
        tokenizer = load_tokenizer(name)
    except (OSError, ImportError) as error:
        raise ValueError(f"--model {name}: {str(error).strip().splitlines()[0]}") from error

    def load() -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()

    return tokenizer, load


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file of JSON lines; empty lines are skipped. ValueError, naming file and line."""
    number = 0
    try:
        for number, line in numbered_lines(path):
            record = read_json(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
            yield number, record
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}{f':{number}' * bool(number)}: cannot be read as JSON ({why(error)})") from error


def read_responses(path: Path) -> list[Response]:
    """The responses of a file. ValueError, naming file and line, and what the line must have."""
    rows = dict[str, Response]()
    for number, record in json_lines(path):
        try:
            row = _response(record, number)
            if row.id in rows:
                raise ValueError(f"another line has the id {row.id!r}; give each its own")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        rows[row.id] = row
    if not rows:
        raise ValueError(f"{path}: holds no response")
    given = {name: sum(getattr(row, name) is not None for row in rows.values()) for name in ("group", "reward")}
    given["ground_truth or a reward"] = sum((row.reward, row.ground_truth) != (None, None) for row in rows.values())
    for name, lines in given.items():
        if 0 < lines < len(rows):
            raise ValueError(f"{path}: {lines} of {len(rows)} lines have a {name}; give all of them one, or none")
    return list(rows.values())


def _response(record: Mapping[str, Any], number: int) -> Response:
    prompt: Any = record.get("prompt")
    response: Any = record.get("response")
    steps, ranges = record.get("steps"), None
    if isinstance(steps, list) and steps and all(isinstance(step, str) for step in steps):
        between = SEPARATOR if response is None else ""
        ranges = list(pairwise([0, *accumulate(len(step) + len(between) for step in steps)]))
        if response not in (None, text := between.join(steps)):
            raise ValueError("steps must be the response in parts")
        response = text
    chat = isinstance(prompt, list) and prompt and all(isinstance(entry, dict) and "role" in entry for entry in prompt)
    if not chat and not (isinstance(prompt, str) and prompt):
        raise ValueError(f"needs a prompt, a text or messages with role and content; its keys are {list(record)}")
    is_ids = isinstance(response, list) and all(type(token) is int and token >= 0 for token in response)
    if not is_ids and not isinstance(response, str):
        raise ValueError(f"needs a response, a text or token ids, or steps, texts; its keys are {list(record)}")
    template = record.get("chat_template_kwargs")
    if not isinstance(template, dict | None):
        raise ValueError(f"chat_template_kwargs={str(template)[:40]!r} must be an object, the chat template's options")
    tools = record.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"tools={str(tools)[:40]!r} must be a list, as the chat template takes it")
    reward, error, group = record.get("reward"), record.get("error"), record.get("group")
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        raise ValueError(f"reward={str(reward)[:40]!r} must be a finite number")
    row = Response(
        id=str(record.get("id", number)),
        prompt=prompt,
        response=response,
        steps=ranges,
        labelled="error" in record,
        error=tuple(error) if isinstance(error, list) else error,
        ground_truth=record.get("ground_truth"),
        reward=None if reward is None else float(reward),
        group=None if group is None else str(group),
        template={**(template or {}), **({"tools": tools} if tools else {})},
        columns={name: value for name, value in record.items() if name not in KEYS},
    )
    if isinstance(response, str):
        label_ranges(row, response)
    return row


def label_ranges(row: Response, text: str) -> tuple[Ranges, Ranges]:
    """The characters of a response's steps and of its error, none or one. ValueError where ``error`` is neither a step
    nor a range of the text."""
    steps, error = row.steps or [match.span() for match in re.finditer(r"[^\n]*\S[^\n]*\n*", text)], row.error
    if error is None:
        return steps, []
    if type(error) is int and 0 <= error < len(steps):
        return steps, [steps[error]]
    if isinstance(error, tuple) and list(map(type, error)) == [int, int] and 0 <= error[0] < error[1] <= len(text):
        return steps, [error]
    last = len(steps) - 1
    raise ValueError(f"error={error!r:.40} is no step (0 to {last}) and no range [start, end] of the text")


def tokenize(row: Response, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int], list[int]]:
    """The prompt as the model reads it, and the token ids of prompt and response.

    A prompt of messages goes through the chat template; one of text is taken as it is, with what the tokenizer puts in
    front of a text. A labelled text is a whole solution, and gets the end token if there is one; other texts get none.
    ValueError: messages without a chat template, or an empty prompt.
    """
    if isinstance(row.prompt, str):
        prompt, front = row.prompt, []
        if not (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)):
            front = _put_in_front(prompt, tokenizer)
    elif not tokenizer.chat_template:
        raise ValueError(f"{row.id}: the tokenizer has no chat template for its messages; give the text that it read")
    else:
        begun = is_begun(row)
        how = {"add_generation_prompt": not begun, "continue_final_message": begun, "tokenize": False}
        front = []
        try:
            prompt = tokenizer.apply_chat_template(list(row.prompt), **row.template, **how)
        except Exception as error:  # the template's own
            raise ValueError(f"{row.id}: the chat template does not take its prompt ({why(error)})") from error
    prompt_P = front + tokenizer.encode(prompt, add_special_tokens=False)
    if not prompt_P:
        raise ValueError(f"{row.id}: its prompt has no token; give a prompt of at least one")
    if isinstance(row.response, str):
        end = [tokenizer.eos_token_id] if row.labelled and tokenizer.eos_token_id is not None else []
        return prompt, prompt_P, tokenizer.encode(row.response, add_special_tokens=False) + end
    return prompt, prompt_P, list(row.response)


def is_begun(row: Response) -> bool:
    """Whether the prompt ends in the beginning of the answer, a message of the assistant, which the response continues."""
    return not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant"


def _put_in_front(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens in front of a text, and not those after it, such as an end token."""
    text = f"{text} a"  # ends with another token than is put after it
    whole, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(plain)] == plain), [])


def _example(row: Response) -> Example | None:
    """The response for methods that ask the prompt again, with the ground truth where verl's data sets have it."""
    truth = {} if row.ground_truth is None else {"reward_model": {"ground_truth": row.ground_truth}}
    return None if isinstance(row.prompt, str) else Example(row.prompt, {**row.columns, **truth}, row.template)


def labels_of(
    row: Response, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, texts: TokenTexts
) -> dict[str, Any]:
    """A labelled response's ``steps`` and ``wrong_step`` as ranges of its tokens ``ids``; ``{}`` for another one.

    The tokens' texts are not always the response's: SentencePiece puts a space in front, decoding takes spaces out, a
    normalizer writes other characters, a special token in the text has none.
    """
    if not row.labelled:
        return {}
    given = isinstance(row.response, str)
    text = str(row.response) if given else tokenizer.decode(ids, skip_special_tokens=True)
    steps, error = label_ranges(row, text)
    spans: Sequence[tuple[int, int]] | None = texts.spans_in(text, ids)
    if spans is None and given:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        offsets += [(len(text), len(text))] * (len(ids) - len(offsets))  # the end token
        # A space that the tokenizer puts in front has the place of the character after it.
        spans = [
            (start, start if token.isspace() and not text[start:end].isspace() else end)
            for token, (start, end) in zip(texts(ids), offsets, strict=True)
        ]
    pieces = texts(ids) if spans is None else [text[start:end] for start, end in spans]
    found = [list(of) for of in token_ranges([*steps, *error], pieces, spans)]
    return {"steps": found[: len(steps)], **({"wrong_step": found[-1]} if error else {})}


def token_ranges(
    ranges: Sequence[tuple[int, int]], texts: Sequence[str], spans: Sequence[tuple[int, int]] | None = None
) -> Ranges:
    """Half-open ranges of characters as ranges of tokens: a token belongs where its first character is that is no blank.
    Of the tokens ``"= "``, ``" 8"``, ``"."`` in ``"=  8."`` the range (3, 4) has the second. ``spans``: where the tokens'
    texts are in that in which the characters are counted; a range that begins and ends within one token then has this
    token. Without them the text is the tokens' joined, and such a range is empty."""
    ends_T = np.cumsum([len(text) for text in texts]) if spans is None else np.array([end for _, end in spans])
    starts_T = ends_T - [len(text) for text in texts]
    blanks_T = np.array([len(text) - len(text.lstrip()) if text.strip() else 0 for text in texts])
    # A token without text is where the next one is, and belongs to what is before it.
    keys_T = starts_T + blanks_T - 0.5 * np.array([not text for text in texts], dtype=bool)
    found = []
    for first, last in ranges:
        start, end = (int(np.searchsorted(keys_T, edge)) for edge in (first, last))
        holds_T = (starts_T <= first) & (last <= ends_T)
        if spans is not None and start == end and holds_T.any():
            start = int(holds_T.argmax())
            end = start + 1
        found.append((start, end))
    return found


def parse_method(spec: str) -> BaseMethod:
    """The method of ``NAME`` or ``NAME:option=value,option=value``; an option of options comes after a dot. Values are read as
    JSON (``true``, ``0.5``, ``"a,b"``), else as texts, in which ``\\,`` is a comma: ``pattern:expression=[0-9]{1\\,3}``.
    ValueError: an unknown method or option, or a value that is not allowed."""
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    while rest:
        key, equals, rest = rest.partition("=")
        value, rest = _first_value(rest)
        *outer, last = key.split(".")
        place: Any = options
        for part in outer:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not equals or not isinstance(place, dict) or last in place:
            raise ValueError(f"--method {spec}: {key!r} must be option=value, and each option given once")
        place[last] = value
    return build(name, options)


def _first_value(text: str) -> tuple[Any, str]:
    """The value that a text begins with, and what comes after the comma behind it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        end = -1
    if end == len(text) or (end > 0 and text[end] == ","):
        return value, text[end + 1 :]
    written, *rest = re.split(r"(?<!\\),", text, maxsplit=1)
    return written.replace("\\,", ","), "".join(rest)


if __name__ == "__main__":
    main()
