"""An agent task for the tiny model: the worked arithmetic of :mod:`verl_cpu.tiny.task`, a step a turn, with a tool that
checks.

The prompt is a chain such as ``7+5-3``. In each turn the model writes the next step as a call of the tool ``check``, or
ends the conversation with a boxed answer:

    model   <tool_call>{"name": "check", "arguments": {"step": "7+5=12"}}</tool_call>
    tool    12
    model   <tool_call>{"name": "check", "arguments": {"step": "12-3=7"}}</tool_call>
    tool    9
    model   \\boxed{9}

The tool replies with the right value after the step, so the next step starts from it whether the last one was right or
wrong. A right step is worth ``RIGHT``, any other call ``WRONG``, also one after the last step, which the tool answers
with ``end``. The right answer is worth ``ANSWER``. So the model decides in each turn whether to go on, up to
``MAX_TURNS``.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from verl_cpu.tiny.task import Problem, boxed_answer

RIGHT = 1.0
WRONG = -1.0
ANSWER = 1.0
MAX_TURNS = 8
"""Of the model's, as ``rollout.multi_turn.max_assistant_turns``: six steps, an answer, and one turn too many."""
NOTHING_LEFT = "end"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def call_text(step: str) -> str:
    """Returns the turn that has a step checked, in the format ``hermes`` of ``rollout.multi_turn.format``."""
    return '<tool_call>{"name": "check", "arguments": {"step": "' + step + '"}}</tool_call>'


def called_step(turn: str) -> str | None:
    """Returns the step that a turn has checked; ``None`` where it calls no tool, as verl's parser of that format
    decides it."""
    calls = _CALL.findall(turn)
    if not calls:
        return None
    try:
        return str(json.loads(calls[0])["arguments"]["step"])
    except (ValueError, KeyError, TypeError):
        return None


def check(problem: Problem, calls: int, step: str) -> tuple[str, float]:
    """Returns the tool's reply to a step such as ``12-3=9``, and its reward; ``calls`` were made before, each of
    which takes up a step of the chain."""
    if calls >= len(problem.steps):
        return NOTHING_LEFT, WRONG
    operator, term = problem.steps[calls]
    # Running values of 7+5-3 are 7, 12 and 9: after one call 12-3=9 is right.
    value, result = (problem.first, *problem.values)[calls : calls + 2]
    return str(result), RIGHT if step == f"{value}{operator}{term}={result}" else WRONG


def turn_rewards(tool_rewards: Sequence[float], turns: int, answered: bool) -> list[float]:
    """Returns one reward for each of the model's ``turns``: the tool's, with the answer's added to that of the last
    turn, which makes no call unless the conversation reached its longest length with it."""
    rewards = [*tool_rewards, 0.0][:turns]
    rewards[-1] += ANSWER * answered
    return rewards


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """Reward function for verl's tool agent loop. ``score``: the sum of the turns' rewards, which is all that GRPO
    gets; ``turn_rewards``: the same by turn; ``acc``: 1 where every turn is right, and none too many or too few, else
    0."""
    # verl counts the prompt and the replies among the turns, so half of them are the model's.
    turns = int(extra_info["num_turns"]) // 2
    answered = boxed_answer(solution_str) == ground_truth
    rewards = turn_rewards(extra_info["tool_rewards"], turns, answered)
    perfect = is_perfect(Problem.parse(extra_info["problem"]), rewards)
    return {"score": sum(rewards), "acc": float(perfect), "turn_rewards": rewards}


def is_perfect(problem: Problem, rewards: list[float]) -> bool:
    """Returns whether every turn is right, and none is too many or too few, by the turns' rewards."""
    return rewards == [RIGHT] * len(problem.steps) + [ANSWER]
