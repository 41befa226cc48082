"""The command ``check``."""
