"""A trainer's own dump turned into a run file, one file for each trainer."""
