"""What is particular to miles."""
