"""What a GPU computes is held against the CPU before it is trusted."""
