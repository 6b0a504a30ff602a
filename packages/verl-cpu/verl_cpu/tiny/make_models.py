"""Make the models of :mod:`verl_cpu.tiny.shipped` anew and write them into this package, or into another folder:

    python -m verl_cpu.tiny.make_models tiny|agent [FOLDER]

The tiny one is the warm-up with seed 0, its weights rounded. The agent's is that one with a few tokens more, trained on
conversations with mistakes (:func:`verl_cpu.tiny.agent.demonstrate`).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny import shipped
from verl_cpu.tiny.agent import ANSWER, MAX_TURNS, RIGHT, called_step, check, demonstrate, turn_rewards
from verl_cpu.tiny.model import build_model, build_tokenizer
from verl_cpu.tiny.sampling import judge, prompt_ids, sample, uniform
from verl_cpu.tiny.shipped import build_agent_tokenizer, load_shipped, reply_ids, weights_digest
from verl_cpu.tiny.task import Problem, boxed_answer, problems
from verl_cpu.tiny.warm_up import Row, WarmUpSettings, fine_tune, warm_up

MAX_TURN_TOKENS = 16


@dataclass(frozen=True)
class AgentSettings:
    """Supervised training on conversations with mistakes: probabilities that a step is wrong, that a conversation ends
    before a step, and of a call after the last one."""

    error_rate: float = 0.35
    stop_rate: float = 0.06
    extra_rate: float = 0.3
    batch_size: int = 32
    learning_rate: float = 2e-3
    steps: int = 200
    train_size: int = shipped.TRAIN
    held_out: int = shipped.HELD_OUT
    seed: int = 0


def ship(model: PreTrainedModel, folder: Path, settings: Any, measured: Callable, **trained: Any) -> None:
    """Write a model's weights, rounded to bfloat16, with the record of how they were made and what is measured of
    them."""
    model.to(torch.bfloat16).save_pretrained(folder)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record, rounded = {"settings": asdict(settings), **versions, **trained}, model.float().eval()
    record |= {"greedy": measured(rounded, temperature=0.0), "sampled": measured(rounded, seed=settings.seed)}
    record["sha256"] = weights_digest(folder)
    (folder / shipped.RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def make_tiny(folder: Path = shipped.FOLDER) -> None:
    """Warm a freshly initialised model up, and write its weights."""
    settings, tokenizer = WarmUpSettings(), build_tokenizer()
    model = build_model(tokenizer, settings.seed)
    train = problems("train", shipped.TRAIN, seed=settings.seed)
    held_out = problems("validation", shipped.HELD_OUT, seed=settings.seed)
    result = warm_up(model, tokenizer, train, held_out, settings)
    measured = partial(judge, tokenizer=tokenizer, problems=held_out)
    ship(model, folder, settings, measured, train_size=shipped.TRAIN, warm_up=result)


def make_agent(folder: Path = shipped.AGENT_FOLDER) -> None:
    """Train the tiny model on all tokens of conversations after the prompt; also the tool's, from which it learns the
    sums."""
    settings, tokenizer = AgentSettings(), build_agent_tokenizer()
    train = problems("train", settings.train_size, seed=settings.seed)
    held_out = problems("validation", settings.held_out, seed=settings.seed)
    model, rng = build_model(tokenizer, settings.seed), random.Random(settings.seed)
    with torch.no_grad():  # the new tokens follow the others
        for name, values in load_shipped()[0].state_dict().items():
            model.state_dict()[name][: len(values)] = values

    def shown(problem: Problem) -> Row:
        rest: list[int] = []
        rates = {name: getattr(settings, name) for name in ("error_rate", "stop_rate", "extra_rate")}
        for turn, reply in demonstrate(problem, rng, **rates):
            rest += [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
            rest += [] if reply is None else reply_ids(tokenizer, reply)
        return prompt_ids(tokenizer, problem), rest

    def learning_rate(step: int) -> float:
        return settings.learning_rate * min(1.0, step / 20) * (1.1 - step / settings.steps)

    chosen = (rng.choices(train, k=settings.batch_size) for _ in range(settings.steps))
    *_, (_, loss) = fine_tune(model, tokenizer, (list(map(shown, some)) for some in chosen), learning_rate)
    ship(model, folder, settings, partial(measure, tokenizer=tokenizer, chosen=held_out), loss=loss)


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
        prompts, going_on = [contexts[row] for row in active], []
        responses = sample(model, tokenizer, prompts, uniform(seed + turn, len(prompts), MAX_TURN_TOKENS), temperature)
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
        if not (active := going_on):
            break
    return rewards


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chosen: list[Problem], **options: Any
) -> dict[str, float]:
    """Mean reward of a conversation, share of conversations without a mistake, and mean number of turns."""
    rewards, count = play(model, tokenizer, chosen, **options), len(chosen)
    perfect = [row == [RIGHT] * len(one.steps) + [ANSWER] for row, one in zip(rewards, chosen, strict=True)]
    sums, turns = sum(map(sum, rewards)), sum(map(len, rewards))
    return {"reward": sums / count, "perfect": sum(perfect) / count, "turns": turns / count}


if __name__ == "__main__":
    {"tiny": make_tiny, "agent": make_agent}[sys.argv[1]](*map(Path, sys.argv[2:]))
