"""The token dump: one response a row, as Parquet."""
