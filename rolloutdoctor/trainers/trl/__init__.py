"""TRL's GRPO and RLOO trainers: options, objective, metrics."""
