"""Objectives of trainers, as plain data: names and numbers, no tensors."""
