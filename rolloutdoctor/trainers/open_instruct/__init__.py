"""open-instruct: options, objective, metrics."""
