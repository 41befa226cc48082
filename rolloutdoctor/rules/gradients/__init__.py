"""Rules about the loss, its KL term and its gradient."""
