"""Writing run files and journals: atomic targets, locks, recordings."""
