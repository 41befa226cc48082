"""The command ``export``: a run as tables, as values of every token, or as a run file."""
