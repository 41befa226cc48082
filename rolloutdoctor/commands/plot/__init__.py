"""The command ``plot``."""
