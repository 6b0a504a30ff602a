"""The tiny task and model: arithmetic, slips, the checker, the files, and that a shipped model is the one of its
record."""

import json
import random
import re
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from verl_cpu.tiny import shipped
from verl_cpu.tiny.make_models import AgentSettings, WarmUpSettings, warm_up
from verl_cpu.tiny.model import build_model, build_tokenizer
from verl_cpu.tiny.prepare import STAMP, code_digest, prepare
from verl_cpu.tiny.sampling import prompt_ids
from verl_cpu.tiny.task import (
    LONG,
    MAX_VALUE,
    SHORT,
    Problem,
    boxed_answer,
    compute_score,
    problems,
    solve,
)


def test_problems_and_solutions():
    """Answers agree with Python, problems depend on the seed alone, splits share none, and each slip is an error."""
    rng = random.Random(3)
    train = problems("train", 400, seed=5)
    for problem in train:
        # Of 7+5-3 the beginnings 7+5 and 7+5-3.
        ends = range(3, len(problem.text) + 1, 2)
        assert list(problem.values) == [eval(problem.text[:end]) for end in ends]
        assert problem.answer == problem.values[-1]
        assert min(problem.values) >= 0
        assert max(problem.values) <= MAX_VALUE
        for wording in (SHORT, LONG):
            correct = solve(problem, 0.0, rng, wording)
            slipped = solve(problem, 0.3, rng, wording)
            assert correct.endswith(f"\\boxed{{{problem.answer}}}")
            assert results(correct) == list(problem.values)
            if boxed_answer(slipped) != str(problem.answer):
                assert results(slipped) != results(correct)
    assert problems("train", 50, seed=5) == train[:50] != problems("train", 50, seed=6)
    held_out = {problem.text for problem in problems("validation", 400, seed=5)}
    assert held_out.isdisjoint(problem.text for problem in train)


CHAIN = Problem.parse("7+5-3")


def results(solution):
    return list(map(int, re.findall(r"=(-?\d+)", solution)))


def test_the_last_complete_box_is_judged():
    for end, score in (("\\boxed{12}", 1), ("\\boxed{1}", 0), ("\\boxed{12", 0)):
        assert compute_score("", f"7+5=12;{end}", "12") == score
    assert boxed_answer("\\boxed{1}\\boxed{2}\\boxed{3") == "2"


def test_a_wrong_rule_becomes_the_likeliest_token():
    """Taught 7 + 5 = 2 each time, the model writes it; taught 7 + 5 = 12, it does not."""
    for no_carry_rate, greedy_accuracy in ((1.0, 0.0), (0.0, 1.0)):
        model, tokenizer = shipped.load_shipped()
        settings = WarmUpSettings(
            error_rate=0.0,
            no_carry_rate=no_carry_rate,
            batch_size=8,
            learning_rate=1e-3,
            steps=20,
            evaluate_every=20,
        )
        result = warm_up(model, tokenizer, [CHAIN], [CHAIN], settings)
        assert result["greedy_accuracy"] == greedy_accuracy


@pytest.mark.slow
def test_folder_has_verls_data_and_a_model_and_is_reused_until_something_changes(tmp_path):
    assert prepare(tmp_path)
    assert not prepare(tmp_path)
    for split, size in (("train", 4096), ("validation", 256)):
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        texts = [problem.text for problem in problems(split, size)]
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            assert row["prompt"] == [{"role": "user", "content": text}]
            assert int(row["reward_model"]["ground_truth"]) == eval(text)
            assert row["extra_info"]["index"] == index
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert prompt_ids(tokenizer, CHAIN) == prompt_ids(build_tokenizer(), CHAIN)
    # Other settings make the folder anew, and so do the first ones again.
    assert prepare(tmp_path, seed=1)
    assert prepare(tmp_path)
    stamp = tmp_path / STAMP
    # A change of this package's code does, too.
    stamp.write_text(stamp.read_text().replace(code_digest(), "of other code"))
    assert prepare(tmp_path)
    # One of each kind that is hashed.
    for name in ("validation.parquet", "model/config.json"):
        (tmp_path / name).write_bytes(b"of something else")
        assert prepare(tmp_path)
        assert not prepare(tmp_path)
        (tmp_path / name).unlink()
        assert prepare(tmp_path)


@pytest.mark.parametrize(
    ("folder", "settings", "load"),
    [
        (shipped.FOLDER, WarmUpSettings(), shipped.load_shipped),
        (shipped.AGENT_FOLDER, AgentSettings(), shipped.load_agent),
    ],
)
def test_a_record_is_that_of_todays_settings_and_of_its_weights(folder, settings, load):
    record = json.loads((folder / shipped.RECORD).read_text())
    assert record["settings"] == asdict(settings)
    assert record["sha256"] == shipped.weights_digest(folder)
    model, tokenizer = load()
    # A fresh model takes the weights only if names and shapes are the same.
    build_model(tokenizer, seed=0).load_state_dict(model.state_dict())
    for value in model.state_dict().values():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float())
