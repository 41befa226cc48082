"""The command ``view``."""
