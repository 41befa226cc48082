"""The command ``info``."""
