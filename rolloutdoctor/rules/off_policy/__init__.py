"""Rules about sampler and trainer."""
