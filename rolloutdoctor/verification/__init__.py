"""Verify a trainer's own functions: small cases, what a trainer computes of them, and laws that hold of any."""
