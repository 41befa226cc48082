"""What is particular to roll."""
