"""The reward function under the name in configurations of earlier versions; it lives in :mod:`grail_advantage.reward`."""

from grail_advantage.reward import compute_score, gold_text, last_boxed

__all__ = ["compute_score", "gold_text", "last_boxed"]
