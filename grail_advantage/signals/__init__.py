"""Signals: how much each token of a response matters for its answer. One method a file."""
