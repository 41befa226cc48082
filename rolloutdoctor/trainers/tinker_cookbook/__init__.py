"""What is particular to tinker-cookbook."""
