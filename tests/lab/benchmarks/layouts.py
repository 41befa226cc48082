"""The rows of a generated run in other places: what a reader must not need more memory for.

Memory of this module itself is one run's: it is for measuring, on runs that fit.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 4
ROW_GROUP = 1024


def half_steps(table, folder, draw):
    """Row groups that hold half a step."""
    rows = int(np.bincount(table.column("step").to_numpy())[0])
    _write(table, folder / "0.parquet", row_group=max(1, rows // 2))


def one_row_group(table, folder, draw):
    """All steps in one row group, as some libraries write a table by default."""
    _write(table, folder / "0.parquet", row_group=len(table))


def straddling(table, folder, draw):
    """Row groups of which many hold the end of one step and the start of the next."""
    _write(table, folder / "0.parquet", row_group=ROW_GROUP * 3 // 4 + 1)


def groups_scattered(table, folder, draw):
    """The rows of every step in any order."""
    step_N = table.column("step").to_numpy()
    _write(table.take(np.lexsort((draw.random(len(table)), step_N))), folder / "0.parquet")


def files_per_rank(table, folder, draw):
    """Every step dealt out over several files, each of them in step order."""
    for rank in range(FILES):
        _write(table.take(np.arange(rank, len(table), FILES)), folder / f"{rank}.parquet")


def rows_anywhere(table, folder, draw):
    """All rows of the run in any order: every row group holds rows of every step."""
    _write(table.take(draw.permutation(len(table))), folder / "0.parquet")


LAYOUTS = {
    "row groups of half a step": half_steps,
    "one row group for all steps": one_row_group,
    "row groups across steps": straddling,
    "groups scattered over a step": groups_scattered,
    "steps scattered over 4 files": files_per_rank,
    "rows anywhere": rows_anywhere,
}


def write_layout(name, run, folder, *, seed=0):
    """Write the rows of the run file `run` in another layout; `folder` is made."""
    folder = Path(folder)
    folder.mkdir()
    LAYOUTS[name](pq.read_table(run), folder, np.random.default_rng(seed))


def _write(table, path, *, row_group=ROW_GROUP):
    floats = [f"{field.name}.list.element" for field in table.schema if _is_float_list(field.type)]
    pq.write_table(
        table,
        path,
        row_group_size=row_group,
        compression="zstd",
        use_dictionary=["group_id"],
        use_byte_stream_split=floats,
    )


def _is_float_list(type_):
    return pa.types.is_list(type_) and pa.types.is_floating(type_.value_type)
