"""Readers of the options that trainers leave beside their dumps and logs."""
