"""What is particular to rllm."""
