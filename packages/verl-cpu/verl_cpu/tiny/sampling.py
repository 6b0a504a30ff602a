"""Sampling without an inference engine, by random numbers that the caller gives. Shape suffixes: B responses, L prompt
and response, T response tokens, V vocabulary."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.task import Problem, boxed_answer

# Six steps and a box take at most 57 while the running value stays in the task's range.
MAX_RESPONSE_TOKENS = 64
MAX_LONG_TOKENS = 200  # likewise, in more words
TOGETHER = 512  # responses that are sampled together


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Token ids of the chat prompt, as verl and vLLM build them from the message."""
    messages = [{"role": "user", "content": problem.text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def uniform(seed: int, rows: int, tokens: int) -> np.ndarray:
    """Random numbers in [0, 1) for :func:`sample`."""
    return np.random.default_rng(seed).random((rows, tokens))


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    uniform_BT: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    copies: int = 1,
) -> list[list[int]]:
    """``copies`` responses a prompt: token ids including the end token, if it was reached. A response depends on its
    prompt, the model and its own random numbers alone: ``uniform_BT``, in [0, 1), one a token up to the length limit T,
    or up to the first that is NaN. Temperature 0 is greedy; with ``top_k`` only so many tokens, the likeliest, are drawn
    from."""
    together = max(1, TOGETHER // copies)
    if len(prompts) > together:
        rows = together * copies
        first = sample(
            model, tokenizer, prompts[:together], uniform_BT[:rows], temperature, top_k, copies
        )
        return first + sample(
            model, tokenizer, prompts[together:], uniform_BT[rows:], temperature, top_k, copies
        )
    batch = tokenizer.pad(
        {"input_ids": list(prompts)}, padding_side="left", return_tensors="pt"
    ).to(model.device)
    tokens_BL = batch["input_ids"]
    mask_BL = batch["attention_mask"]
    positions_BL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
    uniform = torch.from_numpy(uniform_BT).to(model.device)
    responses: list[list[int]] = [[] for _ in range(len(prompts) * copies)]
    alive_B = torch.arange(len(responses), device=model.device)
    cache = DynamicCache()
    for token in range(uniform.shape[1]):
        logits_BV = model(
            tokens_BL,
            attention_mask=mask_BL,
            position_ids=positions_BL,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        if token == 0:  # the copies of a prompt begin with one reading of it
            cache.batch_repeat_interleave(copies)
            logits_BV, mask_BL, positions_BL = (
                values.repeat_interleave(copies, dim=0)
                for values in (logits_BV, mask_BL, positions_BL)
            )
        if top_k:
            least_B1 = logits_BV.topk(min(top_k, logits_BV.shape[1])).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        if temperature:
            running_BV = (logits_BV.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
            # The sum may end below 1 by rounding; scaled, a token of probability 0 is never drawn at the end.
            drawn_B1 = uniform[alive_B, token, None] * running_BV[:, -1:]
            next_B = torch.searchsorted(running_BV, drawn_B1, right=True)[:, 0]
        else:
            next_B = logits_BV.argmax(dim=-1)
        for row, chosen in zip(alive_B.tolist(), next_B.tolist(), strict=True):
            responses[row].append(chosen)
        ended_B = next_B == tokenizer.eos_token_id
        if token + 1 < uniform.shape[1]:
            ended_B |= uniform[alive_B, token + 1].isnan()
        going = (~ended_B).nonzero().flatten()
        if not len(going):
            break
        if len(going) < len(alive_B):
            alive_B = alive_B[going]
            cache.batch_select_indices(going)
        tokens_BL = next_B[going, None]
        mask_BL = torch.cat([mask_BL[going], torch.ones_like(tokens_BL)], dim=1)
        positions_BL = positions_BL[going, -1:] + 1
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
    """Shares of the problems whose sampled response has a complete box (``boxed``), and the exact integer in the last
    one (``right``)."""
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    random_numbers = uniform(seed, len(prompts), max_new_tokens)
    responses = sample(model, tokenizer, prompts, random_numbers, temperature)
    boxes = list(map(boxed_answer, tokenizer.batch_decode(responses, skip_special_tokens=True)))
    right = sum(box == str(problem.answer) for box, problem in zip(boxes, problems, strict=True))
    return {"boxed": 1 - boxes.count(None) / len(problems), "right": right / len(problems)}
