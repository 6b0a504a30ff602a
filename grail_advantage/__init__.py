"""GRAIL and other ways to weight tokens: token-level credit assignment for reinforcement learning with verifiable rewards.

Needs torch, transformers, numpy and pydantic alone; the part for verl is in :mod:`grail_advantage.verl_ext`.
"""

__version__ = "0.2.0.dev0"

from grail_advantage.answers.format import AnswerFormat, answer_format
from grail_advantage.answers.span import AnswerSpan, find_answer_span
from grail_advantage.batch import Example, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_reshaper, register_signal
from grail_advantage.reshapers.base import Reshaper
from grail_advantage.signals.base import Reshaped, ReshapedSignal, Signal
from grail_advantage.signals.grail import Grail
from grail_advantage.signals.oar import Oar
from grail_advantage.token_weights import TokenWeights, compute_token_weights
from grail_advantage.turn_credit import turn_advantages, turns_to_tokens

# Their names before 0.2.
GrailConfig, OarConfig = Grail, Oar

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
