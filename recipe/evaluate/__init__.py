"""Evaluation as published for GRAIL (arXiv 2606.04889): several samples a problem, acc@k, pass@k and mean tokens.

``python -m recipe.evaluate`` is the command.
"""
