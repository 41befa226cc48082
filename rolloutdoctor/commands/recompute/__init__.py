"""recompute."""
