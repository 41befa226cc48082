"""Small run files, and what is said of those that are wrong."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.table import ALIASES

FLOATS = pa.list_(pa.float32())
MASK = pa.list_(pa.uint8())
ALL = (
    "reward",
    "rewards",
    "rank",
    "advantages",
    "response_mask",
    "response_ids",
    "ref_log_probs",
    "kl",
    "old_log_probs",
)


def write(name="run.parquet", row_group_size=None, metadata=None, **columns):
    """Write columns as a run file."""
    table = pa.table(columns)
    if metadata is not None:
        table = table.replace_schema_metadata(metadata.encode())
    pq.write_table(table, name, row_group_size=row_group_size)
    return Path(name)


def read(*columns, paths=("run.parquet",), trainer=None, **options):
    """All batches of some files."""
    return list(open_run(paths, trainer=trainer, aliases=ALIASES).batches(columns, **options))


def refusal(*paths, columns=ALL, error=InputError, **options):
    """The sentence with which some files are refused."""
    with pytest.raises(error) as caught:
        read(*columns, paths=paths or ("run.parquet",), **options)
    assert type(caught.value) is error
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    # The user sees one sentence, not what pyarrow raised before it.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)
