"""Check a run while it is written."""
