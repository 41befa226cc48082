"""The command ``convert``."""
