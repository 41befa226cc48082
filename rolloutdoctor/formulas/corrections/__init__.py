"""Pure: what is done about the sampler's log-probs differing from the trainer's, and about a KL leaving its target."""
