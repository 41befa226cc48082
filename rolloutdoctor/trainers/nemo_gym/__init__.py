"""What is particular to NeMo Gym."""
