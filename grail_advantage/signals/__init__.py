"""Signals: how much each token of a response matters. One method a file, options included, registered by name."""
