"""A GPU is held against the CPU on its first step: each value within its rounding radius."""
