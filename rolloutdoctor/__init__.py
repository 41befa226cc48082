"""rolloutdoctor: recompute what an RL post-training step computed, with and without the known faults."""

__version__ = "0.1.0"
