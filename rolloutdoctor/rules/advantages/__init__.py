"""Rules about advantages and rewards."""
