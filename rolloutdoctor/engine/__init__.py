"""Plans what can run on the columns at hand, folds the steps, and judges once at the end."""
