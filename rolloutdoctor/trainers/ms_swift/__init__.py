"""ms-swift: options, objective, metrics."""
