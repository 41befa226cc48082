"""Options that are stated beside a run."""
