"""Pictures, one file each: they know plain data, and nothing of tensors or files; figures are matplotlib's."""
