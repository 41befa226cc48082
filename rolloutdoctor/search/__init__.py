"""Search for what a trainer computed, by its log: hypotheses, candidates, trials on some steps, counts on all."""
