"""llama_factory."""
