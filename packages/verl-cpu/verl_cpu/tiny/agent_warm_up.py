"""The SFT-initialised model of the agent task, which comes with this package in bfloat16.

    python -m verl_cpu.tiny.agent_warm_up

makes it anew and writes it into this package: the tiny model that was warmed up on worked arithmetic, with a few tokens more,
trained on conversations with mistakes (:func:`verl_cpu.tiny.agent.demonstrate`). It then *can* do the task and seldom does it
without a mistake, so that reinforcement learning has something to gain.

Qwen's template names its tools in a system message; here it does not, because the model knows the one there is. The fixed text
of a call is one token at each end, so that nearly all tokens that the model writes are decisions.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.agent import MAX_TURNS, call_text, called_step, check, demonstrate, turn_rewards
from verl_cpu.tiny.model import TURN_END, TURN_START, build_model, build_tokenizer
from verl_cpu.tiny.sampling import prompt_ids, sample, uniform
from verl_cpu.tiny.sft import Row, fine_tune, labelled
from verl_cpu.tiny.shipped import load_shipped, ship
from verl_cpu.tiny.task import Problem, boxed_answer, problems

FOLDER = Path(__file__).parent / "warmed_up_agent"
CALL_START, CALL_END = call_text("|").split("|")
REPLY_START, REPLY_END = "<tool_response>", "</tool_response>"
# As Qwen's, which shows a tool's reply as a user's message.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\n' }}"
    "{{ '<tool_response>' + message['content'] + '</tool_response>' if message['role'] == 'tool' else message['content'] }}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_TURN_TOKENS = 16


@dataclass(frozen=True)
class AgentWarmUpSettings:
    """Supervised training on conversations with mistakes."""

    error_rate: float = 0.35
    """Probability that a step of a conversation is wrong."""
    stop_rate: float = 0.06
    """Probability that a conversation ends before a step."""
    extra_rate: float = 0.3
    """Probability of a call after the last step."""
    batch_size: int = 32
    learning_rate: float = 2e-3
    steps: int = 200
    train_size: int = 4096
    held_out: int = 256
    seed: int = 0


def build_agent_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the fixed text of calls and replies, and a template for replies."""
    tokenizer = build_tokenizer()
    fixed = (CALL_START, CALL_END, REPLY_START, REPLY_END)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in fixed])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_agent() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model in float32, whose weights are bfloat16 numbers, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32), build_agent_tokenizer()


def reply_ids(tokenizer: PreTrainedTokenizerFast, reply: str) -> list[int]:
    """The tokens between two turns of the model, as verl writes them after a turn's end token."""
    text = f"\n{TURN_START}user\n{REPLY_START}{reply}{REPLY_END}{TURN_END}\n{TURN_START}assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    chosen: list[Problem],
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[float]]:
    """Each problem's rewards by turn, from sampled conversations. Temperature 0 is greedy."""
    contexts = [prompt_ids(tokenizer, problem) for problem in chosen]
    rewards: list[list[float]] = [[] for _ in chosen]
    active = list(range(len(chosen)))
    for turn in range(MAX_TURNS):
        prompts = [contexts[row] for row in active]
        drawn_BT = uniform(seed + turn, len(prompts), MAX_TURN_TOKENS)
        responses = sample(model, tokenizer, prompts, drawn_BT, temperature)
        going_on = []
        for row, ids in zip(active, responses, strict=True):
            problem, text = chosen[row], tokenizer.decode(ids)
            step = called_step(text)
            if step is None or turn == MAX_TURNS - 1:
                rewards[row] = turn_rewards(rewards[row], turn + 1, boxed_answer(text) == str(problem.answer))
                continue
            reply, reward = check(problem, turn, step)
            rewards[row].append(reward)
            contexts[row] += ids + reply_ids(tokenizer, reply)
            going_on.append(row)
        active = going_on
        if not active:
            break
    return rewards


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chosen: list[Problem], **options: Any
) -> dict[str, float]:
    """Mean reward of a conversation, share of conversations without a mistake, and mean number of turns."""
    rewards = play(model, tokenizer, chosen, **options)
    perfect = [row == [1.0] * (len(problem.steps) + 1) for row, problem in zip(rewards, chosen, strict=True)]
    sums, turns = [sum(row) for row in rewards], [len(row) for row in rewards]
    return {
        name: sum(values) / len(chosen) for name, values in (("reward", sums), ("perfect", perfect), ("turns", turns))
    }


def make(folder: Path = FOLDER) -> None:
    """Train the model and write its weights with the record of how they were made."""
    settings, tokenizer = AgentWarmUpSettings(), build_agent_tokenizer()
    train = problems("train", settings.train_size, seed=settings.seed)
    held_out = problems("validation", settings.held_out, seed=settings.seed)
    model, started = _wider_model(tokenizer, settings.seed), time.monotonic()
    loss = _train(model, tokenizer, train, settings)
    seconds = round(time.monotonic() - started, 1)

    def measured(rounded: PreTrainedModel) -> dict[str, Any]:
        greedy = measure(rounded, tokenizer, held_out, temperature=0.0)
        return {"greedy": greedy, "sampled": measure(rounded, tokenizer, held_out, seed=settings.seed)}

    ship(model, folder, "verl_cpu.tiny.agent_warm_up", settings, measured, loss=loss, seconds=seconds)


def _wider_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """The warmed-up tiny model with new rows for the new tokens, which follow the others."""
    narrow, known = load_shipped()
    model = build_model(tokenizer, seed)
    with torch.no_grad():
        for name, values in narrow.state_dict().items():
            model.state_dict()[name][: len(values)] = values
    assert tokenizer.convert_ids_to_tokens(range(len(known))) == known.convert_ids_to_tokens(range(len(known)))
    return model


def _train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, train: list[Problem], settings: AgentWarmUpSettings
) -> float:
    """Train in place on all tokens after the prompt; also the tool's, from which it learns the sums. Returns the last loss."""
    rng = random.Random(settings.seed)
    rates = {"error_rate": settings.error_rate, "stop_rate": settings.stop_rate, "extra_rate": settings.extra_rate}

    def shown(problem: Problem) -> Row:
        rest: list[int] = []
        for turn, reply in demonstrate(problem, rng, **rates):
            rest += [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
            rest += [] if reply is None else reply_ids(tokenizer, reply)
        return labelled(prompt_ids(tokenizer, problem), rest)

    def learning_rate(step: int) -> float:
        return settings.learning_rate * min(1.0, step / 20) * (1.1 - step / settings.steps)

    chosen = (rng.choices(train, k=settings.batch_size) for _ in range(settings.steps))
    batches = ([shown(problem) for problem in problems] for problems in chosen)
    for step, loss in fine_tune(model, tokenizer, batches, learning_rate):
        if step % 20 == 0:
            print(f"warm-up step {step}/{settings.steps}  loss {loss:.4f}", flush=True)
    return loss


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
