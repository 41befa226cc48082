"""prime-rl: its dotted options, objective and metrics."""
