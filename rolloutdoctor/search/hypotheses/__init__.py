"""Named edits of an objective: what a fix of a known fault would change."""
