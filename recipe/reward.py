"""The judge under the name that configurations of earlier versions have; it lives in :mod:`grail_advantage.reward`."""

from grail_advantage.reward import compute_score, gold_text, last_boxed

__all__ = ["compute_score", "gold_text", "last_boxed"]
