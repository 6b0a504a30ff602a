"""Reshapers: maps from token scores to token weights. One a file, registered by name when this package is imported."""

from grail_advantage.reshapers import bilevel, log_zscore, mean_ratio, power, top  # noqa: F401
