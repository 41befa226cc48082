"""What is particular to llama-factory."""
