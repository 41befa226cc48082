"""What a user adds to a trainer so that it logs a run file, one file for each trainer."""
