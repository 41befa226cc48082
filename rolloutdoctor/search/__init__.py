"""What a trainer computed, found by its log: hypotheses, candidates, trials on some steps, counts on all of them."""
