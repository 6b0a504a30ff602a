"""Sampling with transformers' ``generate``, enough to measure a tiny model without an inference engine."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.task import Problem, boxed_answer

# Six steps and a box take at most 57 tokens while the running value stays in the task's range.
MAX_RESPONSE_TOKENS = 64


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Token ids of the chat prompt, as verl and vLLM build them from the message."""
    messages = [{"role": "user", "content": problem.text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    seed: int = 0,
) -> list[list[int]]:
    """One response a prompt: token ids including the end token, if it was reached. Temperature 0 is greedy."""
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens_BL = model.generate(**batch, **options, max_new_tokens=max_new_tokens)
    responses = []
    for row in tokens_BL[:, batch["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        responses.append(row[:end])
    return responses


def judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    seed: int = 0,
) -> dict[str, float]:
    """Shares of the problems whose sampled response has a complete box (``boxed``), and the exact integer in the last one
    (``right``)."""
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    responses = sample(model, tokenizer, prompts, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    found = [boxed_answer(text) for text in tokenizer.batch_decode(responses, skip_special_tokens=True)]
    right = sum(answer == str(problem.answer) for answer, problem in zip(found, problems, strict=True))
    return {"boxed": 1 - found.count(None) / len(problems), "right": right / len(problems)}
