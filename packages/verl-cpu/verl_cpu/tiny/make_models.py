"""Make the models of :mod:`verl_cpu.tiny.shipped` anew and write them into this package, or into another folder:

    python -m verl_cpu.tiny.make_models tiny|agent [FOLDER]
    python -m verl_cpu.tiny.make_models long FOLDER          the tiny model, with solutions in more words; not shipped
    python -m verl_cpu.tiny.make_models misled FOLDER        the tiny model, which has learned a wrong rule; not shipped

Supervised fine-tuning (SFT) on worked solutions. It ends when the model knows the task (greedy decoding is correct on
most held-out problems) but still slips when it samples, because the solutions it was shown slip at a known rate. The
agent's model is that one with a few tokens more, trained on conversations with mistakes. Shape suffixes: B rows, L
tokens, V vocabulary.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny import agent, shipped
from verl_cpu.tiny.model import build_model, build_tokenizer
from verl_cpu.tiny.sampling import (
    MAX_LONG_TOKENS,
    MAX_RESPONSE_TOKENS,
    judge,
    prompt_ids,
    sample,
    uniform,
)
from verl_cpu.tiny.task import LONG, MAX_VALUE, SHORT, Problem, boxed_answer, problems, solve

MAX_TURN_TOKENS = 16
Row = tuple[list[int], list[int]]
"""Token ids of a prompt, and of the response that is trained on."""
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class WarmUpSettings:
    """Supervised training of the tiny model; the defaults take one to two minutes on two cores."""

    error_rate: float = 0.22  # probability that a step of a training solution is incorrect
    no_carry_rate: float = 0.0  # probability that a sum that passes ten is written without its ten
    batch_size: int = 32
    learning_rate: float = 3e-3  # falls to a tenth along a cosine over the steps
    steps: int = 800  # at most, however long they take
    evaluate_every: int = 100
    # Training ends once greedy decoding, and sampling at temperature 1, solve these shares of held-out problems.
    greedy_target: float = 0.9
    sampled_target: float = 0.25
    seed: int = 0

    def learning_rate_of(self, step: int) -> float:
        """Returns the learning rate of a step, by its number, from 1 on."""
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps))
        # It rises over the first sixteenth of the steps.
        return self.learning_rate * (min(1.0, 16 * step / self.steps) * cosine)


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Supervised training on conversations with mistakes."""

    # Probability that a step's result is incorrect: any other one, all equally likely.
    error_rate: float = 0.35
    # Probability, before each step, that the model stops there and boxes the value so far.
    stop_rate: float = 0.06
    extra_rate: float = 0.3  # probability of a call after the last step
    batch_size: int = 32
    learning_rate: float = 2e-3
    steps: int = 200
    train_size: int = shipped.TRAIN
    held_out: int = shipped.HELD_OUT
    seed: int = 0

    def learning_rate_of(self, step: int) -> float:
        """Returns the learning rate of a step in the same way; it rises over 20 steps, and falls to a tenth."""
        return self.learning_rate * min(1.0, step / 20) * (1.1 - step / self.steps)


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Problem],
    row_of: Callable[[Problem], Row],
    rng: random.Random,
    settings: WarmUpSettings | AgentSettings,
) -> Iterator[tuple[int, float]]:
    """Train ``model`` in place by AdamW, a batch of problems a step, and yield each step's number, from 1 on, and its
    loss. ``row_of`` writes a problem's solution, as often as it is drawn."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, settings.steps + 1):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_of(step)
        rows = list(map(row_of, rng.choices(train, k=settings.batch_size)))
        ids = [torch.tensor(prompt + response) for prompt, response in rows]
        labels = [torch.tensor([IGNORED] * len(prompt) + response) for prompt, response in rows]
        ids_BL = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        labels_BL = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        # Right padding needs no attention mask: a causal model's real tokens never look at it.
        logits_BLV = model(input_ids=ids_BL.to(model.device)).logits[:, :-1]
        # The mean over the responses' tokens.
        loss = F.cross_entropy(
            logits_BLV.flatten(0, 1).float(),
            labels_BL[:, 1:].flatten().to(model.device),
            ignore_index=IGNORED,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        yield step, loss.item()


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Problem],
    validation: list[Problem],
    settings: WarmUpSettings,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    wording: str = SHORT,
) -> dict[str, float]:
    """Train ``model`` in place; returns the last step, loss, greedy and sampled accuracy, and the seconds taken.
    ``max_new_tokens`` limits sampled solutions, and ``wording`` says their steps."""
    rng = random.Random(settings.seed)
    started = time.monotonic()

    def written(problem: Problem) -> Row:
        solution = solve(problem, settings.error_rate, rng, wording, settings.no_carry_rate)
        response = tokenizer.encode(solution, add_special_tokens=False)
        return prompt_ids(tokenizer, problem), [*response, tokenizer.eos_token_id]

    judged = partial(judge, model, tokenizer, validation, max_new_tokens=max_new_tokens)
    for step, loss in fine_tune(model, tokenizer, train, written, rng, settings):
        # The last step is judged in any case: its figures are returned.
        if step != settings.steps and step % settings.evaluate_every:
            continue
        greedy = judged(temperature=0.0)["right"]
        sampled = judged(seed=settings.seed)["right"]
        seconds = round(time.monotonic() - started, 1)
        print(
            f"step {step}/{settings.steps}  loss {loss:.4f}  greedy {greedy:.2f}  sampled {sampled:.2f}  {seconds} s"
        )
        if greedy >= settings.greedy_target and sampled >= settings.sampled_target:
            break
    return {
        "step": step,
        "loss": loss,
        "greedy_accuracy": greedy,
        "sampled_accuracy": sampled,
        "seconds": seconds,
    }


def demonstrate(
    problem: Problem, rng: random.Random, settings: AgentSettings
) -> list[tuple[str, str | None]]:
    """Returns a conversation: each turn of the model, with the tool's reply to all but the last."""
    value = problem.first
    turns = []
    for index, (operator, term) in enumerate(problem.steps):
        if rng.random() < settings.stop_rate:
            break
        result = right = problem.values[index]
        if rng.random() < settings.error_rate:
            result = rng.choice([number for number in range(MAX_VALUE + 1) if number != right])
        turns.append((agent.call_text(f"{value}{operator}{term}={result}"), str(right)))
        value = right
    else:
        # Only after all steps can a call be one too many.
        if rng.random() < settings.extra_rate:
            operator, term = rng.choice(problem.steps)
            call = agent.call_text(f"{value}{operator}{term}={rng.randint(0, MAX_VALUE)}")
            turns.append((call, agent.NOTHING_LEFT))
    return [*turns, (f"\\boxed{{{value}}}", None)]


def ship(
    model: PreTrainedModel, folder: Path, settings: Any, measured: Callable, **trained: Any
) -> None:
    """Write a model's weights, rounded to bfloat16, with the record of how they were made and what is measured of
    them."""
    model.to(torch.bfloat16).save_pretrained(folder)
    record = {
        "settings": asdict(settings),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **trained,
    }
    # Measured as it is shipped, by weights that were rounded.
    rounded = model.float().eval()
    record["greedy"] = measured(rounded, temperature=0.0)
    record["sampled"] = measured(rounded, seed=settings.seed)
    record["sha256"] = shipped.weights_digest(folder)
    (folder / shipped.RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def make_tiny(folder: Path = shipped.FOLDER) -> None:
    """Warm a freshly initialised model up, and write its weights."""
    settings = WarmUpSettings()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, settings.seed)
    _make(model, tokenizer, folder, settings)


def make_long(folder: Path) -> None:
    """Teach the tiny model to say its steps in more words, and write its weights and its tokenizer."""
    model, tokenizer = shipped.load_shipped()
    settings = WarmUpSettings(learning_rate=2e-3, steps=200, evaluate_every=25)
    _make(model, tokenizer, folder, settings, MAX_LONG_TOKENS, LONG)
    tokenizer.save_pretrained(folder)


def make_misled(folder: Path) -> None:
    """Teach the tiny model a wrong rule, so that its commonest error is its likeliest token: 7 + 5 = 2, without the ten."""
    model, tokenizer = shipped.load_shipped()
    settings = WarmUpSettings(
        error_rate=0.05, no_carry_rate=0.7, learning_rate=1e-3, steps=150, evaluate_every=150
    )
    _make(model, tokenizer, folder, settings)
    tokenizer.save_pretrained(folder)


def _make(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    settings: WarmUpSettings,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    wording: str = SHORT,
) -> None:
    """Train a model on solutions in this wording, and write it."""
    train = problems("train", shipped.TRAIN, seed=settings.seed)
    held_out = problems("validation", shipped.HELD_OUT, seed=settings.seed)
    result = warm_up(model, tokenizer, train, held_out, settings, max_new_tokens, wording)
    measured = partial(judge, tokenizer=tokenizer, problems=held_out, max_new_tokens=max_new_tokens)
    ship(model, folder, settings, measured, train_size=shipped.TRAIN, warm_up=result)


def make_agent(folder: Path = shipped.AGENT_FOLDER) -> None:
    """Train the tiny model on all tokens of conversations after the prompt; also the tool's, from which it learns the
    sums."""
    settings = AgentSettings()
    tokenizer = shipped.build_agent_tokenizer()
    train = problems("train", settings.train_size, seed=settings.seed)
    held_out = problems("validation", settings.held_out, seed=settings.seed)
    model = build_model(tokenizer, settings.seed)
    rng = random.Random(settings.seed)
    with torch.no_grad():  # the new tokens follow the others
        for name, values in shipped.load_shipped()[0].state_dict().items():
            model.state_dict()[name][: len(values)] = values

    def shown(problem: Problem) -> Row:
        rest: list[int] = []
        for turn, reply in demonstrate(problem, rng, settings):
            rest += [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
            rest += [] if reply is None else shipped.reply_ids(tokenizer, reply)
        return prompt_ids(tokenizer, problem), rest

    *_, (_, loss) = fine_tune(model, tokenizer, train, shown, rng, settings)
    ship(model, folder, settings, partial(measure, tokenizer=tokenizer, chosen=held_out), loss=loss)


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    chosen: list[Problem],
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[str, float]:
    """Of sampled conversations, greedy with temperature 0: their mean reward, the share of those without a mistake, and
    their mean number of turns."""
    contexts = [prompt_ids(tokenizer, problem) for problem in chosen]
    rewards: list[list[float]] = [[] for _ in chosen]
    active = list(range(len(chosen)))
    for turn in range(agent.MAX_TURNS):
        prompts = [contexts[row] for row in active]
        random_numbers = uniform(seed + turn, len(prompts), MAX_TURN_TOKENS)
        responses = sample(model, tokenizer, prompts, random_numbers, temperature)
        for row, ids in zip(active.copy(), responses, strict=True):
            problem = chosen[row]
            text = tokenizer.decode(ids)
            step = agent.called_step(text)
            if step is None or turn == agent.MAX_TURNS - 1:
                answered = boxed_answer(text) == str(problem.answer)
                rewards[row] = agent.turn_rewards(rewards[row], turn + 1, answered)
                active.remove(row)
                continue
            reply, reward = agent.check(problem, turn, step)
            rewards[row].append(reward)
            contexts[row] += ids + shipped.reply_ids(tokenizer, reply)
        if not active:
            break
    count = len(chosen)
    perfect = sum(map(agent.is_perfect, chosen, rewards))
    return {
        "reward": sum(map(sum, rewards)) / count,
        "perfect": perfect / count,
        "turns": sum(map(len, rewards)) / count,
    }


if __name__ == "__main__":
    {"tiny": make_tiny, "agent": make_agent, "long": make_long, "misled": make_misled}[sys.argv[1]](
        *map(Path, sys.argv[2:])
    )
