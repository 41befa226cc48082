"""What pictures gather from the steps of a run, beside the modules that draw it."""
