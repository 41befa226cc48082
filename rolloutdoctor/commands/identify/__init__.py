"""The command ``identify``."""
