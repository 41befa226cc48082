"""Number of response tokens in a file, from its footer."""

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.progress import Unit

_TOKEN_COLUMNS = tuple(column.name for column in COLUMNS if column.per_token)


def unit_of(file: RunFile) -> Unit:
    """Tell what a file can be counted in: in tokens if a column has a value for each."""
    return "tokens" if any(name in file.columns for name in _TOKEN_COLUMNS) else "rows"


def response_tokens(file: RunFile, group: int) -> int:
    """Response tokens of a row group; 0 without a token column.

    Parquet counts an empty cell, and a null, as one value: a row without a response counts as one token.
    """
    stored = [file.columns[name].stored for name in _TOKEN_COLUMNS if name in file.columns]
    chunks = file.chunks[group]
    return max((chunks[leaf].values for name in stored for leaf in file.leaves.get(name, ())), default=0)
