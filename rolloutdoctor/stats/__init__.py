"""Pure: mergeable summaries, frozen values with ``+``."""
