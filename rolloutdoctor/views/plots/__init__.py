"""Plots, one file each: they know figures as plain data, no tensors and no run files."""
