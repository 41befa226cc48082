"""What a trainer computes, as plain data: names and numbers, no tensors."""
