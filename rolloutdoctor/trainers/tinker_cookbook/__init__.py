"""tinker_cookbook."""
