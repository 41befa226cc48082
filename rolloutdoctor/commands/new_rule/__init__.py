"""The command ``new-rule``."""
