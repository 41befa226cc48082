"""Readers of logged numbers: one file a format, told from each other by content."""
