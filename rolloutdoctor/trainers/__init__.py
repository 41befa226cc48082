"""The trainers: their own option names, defaults by version, and metrics, one file each; `table` lists them."""
