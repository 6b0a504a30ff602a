"""This package has GRAIL and other ways to weight tokens: token-level credit assignment for reinforcement learning with
verifiable rewards.

It needs torch, transformers, numpy and pydantic alone; the part for verl is in :mod:`grail_advantage.verl_ext`.
"""
# ruff: noqa: F401

__version__ = "0.2.0.dev0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grail_advantage.answers.format import AnswerFormat, answer_format
    from grail_advantage.answers.span import AnswerSpan, find_answer_span
    from grail_advantage.api import TokenWeights, compute_token_weights
    from grail_advantage.data import Example, Rollouts
    from grail_advantage.maps import Weights, register_map
    from grail_advantage.method import AdvantageMethod, Mapped, Method, option, register
    from grail_advantage.methods.oar import Oar
    from grail_advantage.methods.oar import Oar as OarConfig
    from grail_advantage.methods.saliency import Grail
    from grail_advantage.methods.saliency import Grail as GrailConfig
    from grail_advantage.methods.turn_lists import turn_advantages, turns_to_tokens

# Each is imported when it is asked for: verl imports this package in every process, most of which need none of them.
_MODULES = {
    "answers.format": "AnswerFormat answer_format",
    "answers.span": "AnswerSpan find_answer_span",
    "api": "TokenWeights compute_token_weights",
    "data": "Example Rollouts",
    "maps": "Weights register_map",
    "method": "AdvantageMethod Mapped Method option register",
    "methods.oar": "Oar OarConfig",
    "methods.saliency": "Grail GrailConfig",
    "methods.turn_lists": "turn_advantages turns_to_tokens",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name.removesuffix("Config"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
