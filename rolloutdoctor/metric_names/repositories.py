"""Repositories of trainers."""

from collections.abc import Mapping

REPOSITORIES: Mapping[str, str] = {"trl-rloo": "trl", "nemo-rl": "rl"}
"""Trainer to the name of its repository, where that is another."""
