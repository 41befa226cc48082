"""Follow a run that goes on: its files, the journals of its recorder, the dump that its trainer writes."""
