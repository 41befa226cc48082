"""What is particular to torchforge."""
