"""Names under which trainers log their metrics."""
