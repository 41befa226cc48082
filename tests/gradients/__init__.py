"""Gradients of parameters beside those of log-probs and logits, step by step: docs/gradients.md."""
