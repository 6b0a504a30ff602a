"""Resolvers of ``recipe/config``: ``${sum:...}``, ``${product:...}``, ``${divisor:...}`` and ``${chat_template:NAME}``.

Ray's workers do not know them, so :mod:`recipe.main_grail` puts the values in their place before a run starts.
"""

from __future__ import annotations

import math

from omegaconf import OmegaConf

from recipe.chat_templates import read_chat_template


def divisor(most: int, *factors: int) -> int:
    """The largest number up to ``most`` that divides the product of the others: ``divisor(128, 4, 50)`` is 100."""
    product = math.prod(factors)
    return next((number for number in range(most, 1, -1) if product % number == 0), 1)


def register() -> None:
    """Make them known to OmegaConf; a second time changes nothing."""
    OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)
    OmegaConf.register_new_resolver("product", lambda *numbers: math.prod(numbers), replace=True)
    OmegaConf.register_new_resolver("divisor", divisor, replace=True)
    OmegaConf.register_new_resolver("chat_template", lambda name: read_chat_template(name).rstrip("\n"), replace=True)
