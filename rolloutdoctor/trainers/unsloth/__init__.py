"""What is particular to unsloth."""
