"""What is particular to rlinf."""
