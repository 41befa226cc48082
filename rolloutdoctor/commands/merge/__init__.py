"""The command ``merge``."""
