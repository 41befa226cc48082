"""JSON Schemas of what the commands print for programs."""


def listing(name: str | None = None) -> str:
    """Return the JSON Schema of an output, or list the outputs.

    Raises:
        UsageError: if there is no such output.
    """
    from rolloutdoctor.results.errors import UsageError
    from rolloutdoctor.views.schema import OUTPUTS, listed, schema_of

    if name is None:
        return listed()
    if name not in OUTPUTS:
        raise UsageError(f"no output {name!r}; there are {', '.join(OUTPUTS)}")
    return schema_of(name)
