"""The command ``report``."""
