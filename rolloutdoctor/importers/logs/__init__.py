"""Readers of logged numbers: one file a format, recognised by content."""
