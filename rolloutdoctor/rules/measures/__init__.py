"""What rules measure in the tokens."""
