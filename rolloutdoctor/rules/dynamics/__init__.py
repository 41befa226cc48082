"""Rules about the dynamics of a training."""
