"""The token pass on a GPU by one Triton kernel."""
