"""Evaluation as published for GRAIL (arXiv 2606.04889); ``python -m recipe.evaluate`` is the command."""
