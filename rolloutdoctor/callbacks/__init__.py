"""The rules inside a trainer: what they find is logged among its own metrics, one file for each trainer."""
