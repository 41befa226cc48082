"""The command ``diff``."""
