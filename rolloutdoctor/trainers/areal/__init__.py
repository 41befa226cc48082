"""AReaL: options, objective, metrics."""
