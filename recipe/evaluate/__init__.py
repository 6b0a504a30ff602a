"""Evaluation as published for GRAIL (arXiv 2606.04889): several samples a problem, acc@k, pass@k and mean tokens.

``python -m recipe.evaluate`` is the command. :mod:`~recipe.evaluate.checkpoint` turns ``--model`` into a model folder,
:mod:`~recipe.evaluate.problems` reads the benchmarks and makes the prompts, :mod:`~recipe.evaluate.engines` samples with vLLM,
:mod:`~recipe.evaluate.store` keeps every sample, :mod:`~recipe.evaluate.report` and :mod:`~recipe.evaluate.compare` judge,
count and write tables.
"""
