"""Rules about logged metrics."""
