"""A model's own errors without a labeller: it solves GSM8K, and the first error is the first written equation that is false.

``python -m bench sample QUESTIONS OUT --model NAME`` writes labelled lines for ``analyze``; QUESTIONS has ``question`` and
``answer`` a line, as GSM8K. The error is the right side of the false equation. An incorrect solution without a false
equation, and a correct one with one, are left out and counted when the file is read, as is one without an answer.

An equation counts where both sides are complete expressions of numbers, ``+ - * /`` and brackets, and one has an operator:
``2 * 3 = 6 apples`` counts, ``half of 10 + 2 = 7`` does not. Values are exact; a decimal on the right may be rounded or cut
off.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv
from pathlib import Path

import numpy as np

from bench.convert import BOX, asked
from grail_advantage.analyze.lines import Response, json_lines
from grail_advantage.analyze.models import files_digest, model_of
from grail_advantage.analyze.tokens import tokenize
from verl_cpu.tiny.sampling import sample
from verl_cpu.tiny.task import boxed_answer

TOGETHER = 4  # questions that are sampled together
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIDE = rf"[-+(\s$£€]*(?:{_NUMBER})[\s%)]*(?:[-+*/][-+(\s$£€]*(?:{_NUMBER})[\s%)]*)*"
_EQUATIONS = re.compile(rf"{_SIDE}(?:=(?:{_SIDE}))+")
_SIGNS = {"*": (r"\times", r"\cdot", "\u00d7"), "/": (r"\div", "\u00f7"), "-": ("\u2212", "\u2013")}
_SIGNS |= {"$": (r"\$",), "%": (r"\%",), "": (r"\left", r"\right", "**", r"\(", r"\)", r"\[", r"\]")}
_WORDS = "of|from|by|times|plus|minus|than|over|to|per|and|divided|subtract|add|multiply|half|twice|mod"
# Where it is before an expression, this makes it part of a longer one, or of other words; likewise after it.
_BEFORE = re.compile(rf"[-+*/^=<>\\\\()}}]\s*$|[\w\]'.]$|\d +$|x +$|\b(?:{_WORDS})\s*$", re.IGNORECASE)
_AFTER = re.compile(
    r"[\w\\{]|\.\d| +\d|\s*(?:[-+*/^=(]|with\b|and\b|r\b|mod|\\(?!text|quad|[,;!]))|[^.\n]{0,30}(?:remainder|quotient)",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"[\d)%]\s*[-+*/]")
_OPERATIONS: dict[type, Callable] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def evaluate(expression: str) -> Fraction | None:
    """The exact value of numbers, ``+ - * /`` and parentheses; ``None`` for anything else."""
    text = re.sub(r"[$£€,]", "", re.sub(r"%", "/100", expression)).strip()

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(text, node) or "")
        if isinstance(node, ast.BinOp):
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError

    try:
        return value(ast.parse(text, mode="eval").body) if len(text) < 200 else None
    except (ValueError, SyntaxError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def first_false(text: str) -> tuple[int, int] | None:
    """Characters of the right side of the first false equation; ``None`` where there is none."""
    plain = text
    for sign, spellings in _SIGNS.items():
        for written in spellings:
            plain = plain.replace(written, sign.rjust(len(written)))
    plain = re.sub(r"(?<=[\d)%])( ?)x( ?)(?=[\d$.])", r"\1*\2", plain)
    for match in _EQUATIONS.finditer(plain):
        equation = match.group()
        before = plain[: match.start() + len(equation) - len(equation.lstrip())]
        signed = equation.lstrip()[0] in "+-" and re.search(r"[\w)}|\]]\s*$", before)
        if signed or _BEFORE.search(before) or _AFTER.match(plain, match.start() + len(equation.rstrip())):
            continue
        start, left, reckoned = match.start(), None, False
        for side in equation.split("="):
            value = evaluate(side)
            if reckoned and left is not None and value is not None and not _same(left, equation, value, side):
                return start + len(side) - len(side.lstrip()), start + len(side.rstrip())
            left, start = value, start + len(side) + 1
            reckoned |= bool(_OPERATOR.search(side))
    return None


def _same(left: Fraction, equation: str, right: Fraction, side: str) -> bool:
    """Whether two sides are equal, the right one rounded or cut off, and a percentage written as its number."""
    decimals = len(side.strip(" $%)").partition(".")[2]) if not _OPERATOR.search(side) else 0
    scales = (1, 100, Fraction(1, 100)) if "%" in equation else (1,)
    apart = [abs(left * scale - right) for scale in scales]
    return any(one < Fraction(1, 10**decimals) if decimals else not one for one in apart)


def main(arguments: Sequence[str]) -> None:
    """``python -m bench sample QUESTIONS OUT --model NAME``; questions that OUT has are not sampled again."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench sample", description=__doc__, formatter_class=layout)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="as of grail_advantage.analyze")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--problems", type=int, default=200, help="questions, drawn at random")
    parser.add_argument("--samples", type=int, default=4, help="solutions of each")
    parser.add_argument("--length", type=int, default=320, help="most tokens of a solution")
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(arguments)
    questions = [(number, line["question"], line["answer"]) for number, line in json_lines(options.questions)]
    questions = random.Random(0).sample(questions, min(len(questions), options.problems))
    sampled = {name: getattr(options, name) for name in ("model", "samples", "length", "temperature")}
    sampled |= {"questions": files_digest(str(options.questions)), "files": files_digest(options.model)}
    there = [line for _, line in json_lines(options.out)] if options.out.exists() else []
    for line in there:
        if others := [name for name, value in sampled.items() if line.get("sampled", {}).get(name) != value]:
            raise SystemExit(f"{options.out} was sampled with another {', '.join(others)}; name another file")
    done = {line["group"] for line in there}
    tokenizer, load = model_of(options.model, options.device)
    model, waiting = load(), [one for one in questions if str(one[0]) not in done]
    for first in range(0, len(waiting), TOGETHER):
        some = [one for one in waiting[first : first + TOGETHER] for _ in range(options.samples)]
        prompts = [asked(question + BOX) if tokenizer.chat_template else question + BOX for _, question, _ in some]
        ids = [tokenize(Response(id="", prompt=prompt, response=""), tokenizer)[1] for prompt in prompts]
        shape = options.samples, options.length
        drawn = [np.random.default_rng(number).random(shape) for number, *_ in some[:: options.samples]]
        responses = sample(model, tokenizer, ids, np.concatenate(drawn), options.temperature)
        lines = []
        for place, ((number, _, answer), response) in enumerate(zip(some, responses, strict=True)):
            text, truth = tokenizer.decode(response, skip_special_tokens=True), answer.rpartition("####")[2].strip()
            value, error = evaluate(boxed_answer(text) or ""), first_false(text)
            line = {"id": f"{number}/{place % options.samples}", "group": str(number), "sampled": sampled}
            line["prompt"] = prompts[place]
            line |= {"response": text, "error": error, "reward": float(value is not None and value == evaluate(truth))}
            lines.append(json.dumps(line | {"ground_truth": truth}, ensure_ascii=False))
        with options.out.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))
        print(f"{min(first + TOGETHER, len(waiting))} of {len(waiting)} questions", flush=True)
