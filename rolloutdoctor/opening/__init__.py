"""Open what people have: run files, dumps, logs, folders; and the options that lie beside them."""
