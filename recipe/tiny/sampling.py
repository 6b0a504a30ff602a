"""Batched sampling with a key-value cache, enough to judge a tiny model without an inference engine."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.task import Problem, boxed_answer

# Six steps and a box take at most 57 tokens while the running value stays in the task's range.
MAX_RESPONSE_TOKENS = 64


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Token ids of the chat prompt, as verl and vLLM build them from the message."""
    messages = [{"role": "user", "content": problem.text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """One response a prompt: token ids including the end token, if it was reached. Temperature 0 is greedy."""
    longest = max(len(ids) for ids in prompts)
    padded = [[tokenizer.pad_token_id] * (longest - len(ids)) + ids for ids in prompts]
    tokens_BL = torch.tensor(padded)
    starts_B = torch.tensor([longest - len(ids) for ids in prompts])
    mask_BL = (torch.arange(longest) >= starts_B[:, None]).long()
    positions_BL = (torch.arange(longest) - starts_B[:, None]).clamp(min=0)

    cache = DynamicCache()
    finished_B = torch.zeros(len(prompts), dtype=torch.bool)
    columns = []
    while len(columns) < max_new_tokens and not finished_B.all():
        output = model(
            input_ids=tokens_BL,
            attention_mask=mask_BL,
            position_ids=positions_BL,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits_BV = output.logits[:, -1].float()
        if temperature == 0:
            next_B = logits_BV.argmax(-1)
        else:
            next_B = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)[:, 0]
        next_B = torch.where(finished_B, tokenizer.pad_token_id, next_B)
        columns.append(next_B)
        finished_B |= next_B == tokenizer.eos_token_id
        tokens_BL = next_B[:, None]
        mask_BL = torch.cat([mask_BL, torch.ones_like(tokens_BL)], dim=1)
        positions_BL = positions_BL[:, -1:] + 1

    responses = []
    for row in torch.stack(columns, dim=1).tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        responses.append(row[:end])
    return responses


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    seed: int = 0,
) -> float:
    """Share of the problems whose sampled answer is right: the last complete box holds the exact integer."""
    generator = torch.Generator().manual_seed(seed)
    responses = sample(
        model,
        tokenizer,
        [prompt_ids(tokenizer, problem) for problem in problems],
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        generator=generator,
    )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = sum(boxed_answer(text) == str(problem.answer) for text, problem in zip(texts, problems, strict=True))
    return right / len(problems)
