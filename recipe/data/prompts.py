r"""The instruction after every problem, in training and evaluation alike (arXiv 2606.04889, training set-up).

The backslash is real: the string ends in ``\boxed{}.``. Written without the ``r`` prefix, ``"\b"`` is a backspace and the
model is asked for ``oxed{}``.
"""

from __future__ import annotations

PROMPT_SUFFIX = r" Please reason step by step, and put your final answer within \boxed{}."


def without_suffix(text: str) -> str:
    """Return ``text`` without surrounding white space and without the suffix, should it already end in it."""
    return text.strip().removesuffix(PROMPT_SUFFIX.strip()).strip()


def user_messages(problem: str) -> list[dict[str, str]]:
    """Return the chat that asks for ``problem``: one user turn that ends in exactly one suffix."""
    return [{"role": "user", "content": without_suffix(problem) + PROMPT_SUFFIX}]
