"""The second pass of an evaluation in one read of every column, on a GPU, for the objectives that most runs have."""
