"""What is particular to verifiers."""
