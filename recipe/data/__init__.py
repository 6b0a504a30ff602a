"""The training set and the benchmarks as parquet files in verl's RLHF schema: ``python -m recipe.data.prepare``."""
