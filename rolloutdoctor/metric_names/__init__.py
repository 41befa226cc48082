"""What trainers log, and under which names."""
