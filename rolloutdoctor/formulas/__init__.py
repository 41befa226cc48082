"""Pure formulas over packed tensors: advantages, losses, corrections, KL estimators."""
