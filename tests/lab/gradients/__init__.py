"""Gradients of parameters beside those of log-probs and logits, step by step: tests/lab/gradients/results.md."""
