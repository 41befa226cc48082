"""OpenRLHF: options, objective, metrics."""
