"""Locations of files: local paths, web, hub and cloud stores, and bounded reads of small files."""
