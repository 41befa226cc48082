"""SkyRL: options, objective, metrics."""
