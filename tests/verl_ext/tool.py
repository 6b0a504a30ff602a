"""A tool for verl's ``tool_agent``, as a user writes one (``rollout.multi_turn.function_tool_path``)."""

from __future__ import annotations

from verl.tools.function_tool import function_tool

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
"""A token of the tiny tokenizer, so that a random model writes it."""


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers, and writes the sum as an answer is written.

    Args:
        a: one number
        b: the other
    """
    return f"\\boxed{{{a + b}}}"
