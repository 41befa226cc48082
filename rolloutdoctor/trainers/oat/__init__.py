"""What is particular to oat."""
