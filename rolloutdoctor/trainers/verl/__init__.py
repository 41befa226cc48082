"""verl: options, objective, metrics."""
