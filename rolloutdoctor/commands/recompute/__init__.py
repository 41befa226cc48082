"""The command ``recompute``."""
