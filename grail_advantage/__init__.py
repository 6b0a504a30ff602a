"""GRAIL and OAR: token-level credit assignment for reinforcement learning with verifiable rewards.

Needs torch and transformers alone; what belongs to verl is in :mod:`grail_advantage.verl_ext`.
"""

from grail_advantage.answer_span import AnswerSpan, find_answer_span
from grail_advantage.config import GrailConfig, OarConfig
from grail_advantage.token_weights import TokenWeights, compute_token_weights

__all__ = ["AnswerSpan", "GrailConfig", "OarConfig", "TokenWeights", "compute_token_weights", "find_answer_span"]
