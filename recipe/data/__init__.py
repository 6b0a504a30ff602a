"""Data preparation: the training set and the benchmarks as parquet files in verl's RLHF schema.

``python -m recipe.data.prepare`` is the command, :mod:`recipe.data.specs` the table of datasets,
:data:`recipe.data.prompts.PROMPT_SUFFIX` the instruction after every problem.
"""
