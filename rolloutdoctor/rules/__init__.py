"""The rules: what can be wrong, how it is found, and how large it is. One file each; `table` lists them."""
