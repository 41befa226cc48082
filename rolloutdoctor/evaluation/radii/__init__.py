"""Rounding radii of what an evaluation gives: how far the trainer's float32 arithmetic may be from exact numbers."""
