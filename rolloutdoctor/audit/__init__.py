"""Hold what a run logged against what its rows and recorded options give, value by value, within rounding."""
