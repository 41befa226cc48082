"""From a batch and an objective to an evaluation: scores, rows, then one pass over the tokens."""
