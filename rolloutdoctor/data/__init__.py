"""A run in memory: the column contract, the packed batch of one step, its token columns."""
