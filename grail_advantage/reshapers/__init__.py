"""Reshapers: maps from a row's token scores to its token weights. One map a file."""
