"""Pictures: one file each, what it gathers and how it is drawn."""
