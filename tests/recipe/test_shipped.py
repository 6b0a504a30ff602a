"""The SFT-initialised model of the example is the one that its record describes."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from verl_cpu.tiny import shipped
from verl_cpu.tiny.model import build_model
from verl_cpu.tiny.sampling import judge, prompt_ids, sample, uniform
from verl_cpu.tiny.task import problems
from verl_cpu.tiny.warm_up import WarmUpSettings

RECORD = json.loads((shipped.FOLDER / shipped.RECORD).read_text())


def test_the_record_is_that_of_todays_warm_up_and_of_these_weights() -> None:
    assert RECORD["settings"] == asdict(WarmUpSettings())
    assert RECORD["sha256"] == shipped.weights_digest()
    model, tokenizer = shipped.load_shipped()
    fresh = build_model(tokenizer, seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    for value in model.state_dict().values():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float())


def test_shares_of_boxed_and_of_correct_responses() -> None:
    """Counted response by response; 30 tokens are too few for long chains."""
    model, tokenizer = shipped.load_shipped()
    asked = problems("validation", 32, seed=0)
    found = judge(model.eval(), tokenizer, asked, max_new_tokens=30, seed=1)
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    boxed = right = 0
    for problem, response in zip(asked, sample(model, tokenizer, prompts, uniform(1, 32, 30)), strict=True):
        _, box, rest = tokenizer.decode(response, skip_special_tokens=True).rpartition("boxed{")
        boxed += bool(box) and "}" in rest
        right += bool(box) and rest.partition("}")[:2] == (str(eval(problem.text)), "}")
    assert found == {"boxed": boxed / 32, "right": right / 32}
    assert 0 < right < boxed < 32
