"""Reshapers: maps from token scores to token weights. One map a file, registered by name."""
