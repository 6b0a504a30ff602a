"""The front page's first screen, and the file that it shows: the weights of one response are the package's in every response
of a token dump, and each block runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.grail_in_one_file import BOXED, HASHES, find_answer
from grail_advantage.analyze import Response, analyze, methods_for
from grail_advantage.answers.format import answer_format
from grail_advantage.dump import DumpRow, read_dump
from tests.documentation import ROOT
from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, prompt_ids, sample, uniform
from verl_cpu.tiny.shipped import load_shipped
from verl_cpu.tiny.task import compute_score, random_problems

SCREEN = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", SCREEN, re.DOTALL | re.MULTILINE)
FILE = "examples/grail_in_one_file.py"
PATTERNS = {"boxed": BOXED, "hashes": HASHES}


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_each_command_draws_three_answers() -> None:
    for line in (line for text in blocks("bash") for line in text.splitlines()):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        drawn = re.findall(r"\(advantage (\S+)\)\n(.*)\n", ran.stdout)
        assert [float(advantage) for advantage, _ in drawn] == [0.5, -0.5, -0.5]
        colours = [set(re.findall(r"48;5;(\d+)m", coloured)) for _, coloured in drawn]
        assert len(colours[0]) == 1 and all(len(used) > 3 for used in colours[1:]), "content alone, and reasoning"


@pytest.fixture(scope="module")
def sampled() -> tuple[Any, Any, list[Response]]:
    """The shipped model, its tokenizer and what it answers; some responses answer twice, or write on after their answer."""
    model, tokenizer = load_shipped()
    asked = [problem for problem in random_problems(32, seed=3) for _ in range(4)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    written = sample(model.eval(), tokenizer, prompts, uniform(0, len(asked), MAX_RESPONSE_TOKENS))
    responses = []
    for place, (problem, ids) in enumerate(zip(asked, written, strict=True)):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        text += {0: "", 1: " so it is", 2: r"; no, \boxed{7}", 3: "<|im_end|>"}[place % 4]
        reward = compute_score("", text, str(problem.answer))
        messages = [{"role": "user", "content": problem.text}]
        responses.append(
            Response(id=str(place), prompt=messages, response=text, reward=reward, ground_truth="", group=problem.text)
        )
    # So few tokens of so many have a score that the weight of the one before the answer is clipped.
    for text, reward in ((r"=\boxed{7}" + 500 * "x", 0.0), (r"\boxed{8}", 1.0)):
        row = Response(id=text, prompt="7+1=8;7", response=text, reward=reward, ground_truth="", group="long")
        responses.append(row)
    return model, tokenizer, responses


def one_file(
    rows: list[DumpRow], model: Any, tokenizer: Any, answer: str, which: int, temperature: float
) -> list[float]:
    """For each response with an answer and an advantage the largest difference of a weight, by the function of the page."""
    (source,) = blocks("python")
    assert source in (ROOT / FILE).read_text(encoding="utf-8")
    names: dict[str, Any] = {"torch": torch}
    exec(source, names)
    differences = []
    for row in rows:
        found = find_answer(tokenizer.convert_ids_to_tokens(row.token_ids_T.tolist()), PATTERNS[answer], which)
        assert (found is None) == (row.span is None)
        advantage = float(row.base_advantage_T[0])
        if found is None or advantage == 0:
            continue
        ids = torch.tensor(row.prompt_ids), torch.tensor(row.token_ids_T)
        weights_T = names["grail_weights"](model, *ids, *found, advantage, temperature)
        assert weights_T.dtype == torch.float32
        differences.append(float(np.abs(weights_T.numpy() - row.weight_T).max()))
    return differences


@pytest.mark.parametrize(
    ("answer", "span", "temperature"), [("boxed", "first", 1.0), ("boxed", "last", 0.6), ("hashes", "last", 1.0)]
)
def test_weights_are_those_of_a_dump(
    answer: str, span: str, temperature: float, sampled: tuple[Any, Any, list[Response]], tmp_path: Path
) -> None:
    model, tokenizer, responses = sampled
    if answer == "hashes":
        responses = [
            Response(**{**vars(row), "response": re.sub(r"\\boxed\{([^}]*)\}", r"#### \1", row.response)})
            for row in responses
        ]
    settings = {
        "model": "shipped",
        "temperature": temperature,
        "answer": answer_format(answer),
        "advantages": "rewards",
    }
    chosen = methods_for([f"grail:span={span}"], responses)
    analyze(responses, chosen, tmp_path / "dump", tokenizer, lambda: model, **settings)
    rows = list(read_dump(tmp_path / "dump"))
    scored = [row for row in rows if row.no_scores is None]
    differences = one_file(rows, model, tokenizer, answer, 0 if span == "first" else -1, temperature)
    assert len(scored) > 30 and len(differences) > len(scored) + 10, (
        "incorrect responses, and correct ones with an answer"
    )
    assert max(differences) < 5e-6
    before = np.concatenate([row.weight_T[: row.span.start] for row in scored])
    assert before.min() == 0.5 and before.max() == 5 and len(np.unique(before)) > 100
