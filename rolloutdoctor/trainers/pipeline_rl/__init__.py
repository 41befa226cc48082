"""What is particular to pipeline-rl."""
