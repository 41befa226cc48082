"""One file per command: options and a function that returns a result. Nothing here parses or prints."""
