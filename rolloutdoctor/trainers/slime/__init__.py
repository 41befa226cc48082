"""slime: options, objective, metrics."""
