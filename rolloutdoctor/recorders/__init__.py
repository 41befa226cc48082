"""Recorders that a user adds to a trainer so that it logs a run file, one module for each trainer."""
