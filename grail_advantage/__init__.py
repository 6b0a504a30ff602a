"""GRAIL and other ways to weight tokens: token-level credit assignment for reinforcement learning with verifiable rewards.

Needs torch, transformers, numpy and pydantic alone; the part for verl is in :mod:`grail_advantage.verl_ext`.
"""

__version__ = "0.2.0.dev0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grail_advantage.answers.format import AnswerFormat, answer_format
    from grail_advantage.answers.span import AnswerSpan, find_answer_span
    from grail_advantage.batch import Example, RolloutBatch
    from grail_advantage.options import option
    from grail_advantage.registry import register_reshaper, register_signal
    from grail_advantage.reshapers.base import Reshaper
    from grail_advantage.signals.base import Reshaped, ReshapedSignal, Signal
    from grail_advantage.signals.grail import Grail
    from grail_advantage.signals.grail import Grail as GrailConfig
    from grail_advantage.signals.oar import Oar
    from grail_advantage.signals.oar import Oar as OarConfig
    from grail_advantage.token_weights import TokenWeights, compute_token_weights
    from grail_advantage.turn_credit import turn_advantages, turns_to_tokens

# Each is imported when it is asked for: verl imports this package in every process, most of which need none of them.
_MODULES = {
    "answers.format": ("AnswerFormat", "answer_format"),
    "answers.span": ("AnswerSpan", "find_answer_span"),
    "batch": ("Example", "RolloutBatch"),
    "options": ("option",),
    "registry": ("register_reshaper", "register_signal"),
    "reshapers.base": ("Reshaper",),
    "signals.base": ("Reshaped", "ReshapedSignal", "Signal"),
    "signals.grail": ("Grail",),
    "signals.oar": ("Oar",),
    "token_weights": ("TokenWeights", "compute_token_weights"),
    "turn_credit": ("turn_advantages", "turns_to_tokens"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_BEFORE_0_2 = {"GrailConfig": "Grail", "OarConfig": "Oar"}

__all__ = [
    "AnswerFormat",
    "AnswerSpan",
    "Example",
    "Grail",
    "GrailConfig",
    "Oar",
    "OarConfig",
    "Reshaped",
    "ReshapedSignal",
    "Reshaper",
    "RolloutBatch",
    "Signal",
    "TokenWeights",
    "answer_format",
    "compute_token_weights",
    "find_answer_span",
    "option",
    "register_reshaper",
    "register_signal",
    "turn_advantages",
    "turns_to_tokens",
]


def __getattr__(name: str) -> Any:
    name = _BEFORE_0_2.get(name, name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
