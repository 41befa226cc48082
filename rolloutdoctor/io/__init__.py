"""Run files: found, read step by step, and written."""
