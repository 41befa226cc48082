"""Rules about what was recorded, and whether it is what it says."""
