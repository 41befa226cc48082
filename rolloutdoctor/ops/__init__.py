"""Pure reductions over packed (ragged) tensors."""
