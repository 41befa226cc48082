"""rllm."""
