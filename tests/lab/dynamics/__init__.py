"""Real small trainings with planted dynamics, checked by their logs alone."""
