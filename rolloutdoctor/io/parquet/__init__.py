"""Reading Parquet: guarded footers, an index of steps, row groups decoded to packed columns."""
