"""Runs of slime's real code that are stored, because slime cannot be installed: healthy ones, and planted faults.

``python tests/parity/slime_runs.py CHECKOUT`` makes them anew from a checkout of slime 0.3.1.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from parity.real_draws import drawn
from parity.real_rows import FLAT_REWARDS, rows_of
from parity.real_setup import NONE, STEPS, Fault, Setup, Step
from parity.real_slime_faults import CASES, SETUP
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.io.metadata import RunMetadata

FOLDER = Path(__file__).parent / "data"
ROWS, LOGS = FOLDER / "slime_runs.parquet", FOLDER / "slime_runs.json"
HEALTHY = (*range(10), 21, 31, 33, 48, 60, 79)
"""Numbers of drawn configurations; the last six are those that once raised an alarm."""
FLAT = (1, 2, 6, 36, 50, 57)
"""The same with groups of equal rewards."""
AT = {"severe": tuple(range(STEPS)), "mild": (3,)}
TOKENS = (
    "policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "values", "advantages",
)  # fmt: skip
MASKS = ("response_mask", "response_mask_pre")


@dataclass(frozen=True)
class StoredRun:
    """A run as slime's code made it.

    Attributes:
        name: "healthy NUMBER", "healthy flat NUMBER", or the cause and its strength.
        options: those recorded.
        rows: a row for each response, without the name of the run.
        metrics: those of each step.
    """

    name: str
    options: Mapping[str, object]
    rows: pa.Table
    metrics: tuple[Mapping[str, float], ...]

    def write(self, path: Path) -> Path:
        """Write a run file and its log."""
        metadata = RunMetadata("slime", "0.3.1", dict(self.options)).encode()
        keep = [name for name in self.rows.column_names if self.rows.column(name).null_count < len(self.rows)]
        pq.write_table(self.rows.select(keep).replace_schema_metadata(metadata), path)
        log = [
            {"step": step, "split": "train", "name": name, "value": value}
            for step, metrics in enumerate(self.metrics)
            for name, value in metrics.items()
        ]
        pq.write_table(pa.Table.from_pylist(log), path.with_name(f"{path.stem}.metrics.parquet"))
        return path


def stored() -> Iterator[StoredRun]:
    """The stored runs."""
    rows, logs = pq.read_table(ROWS), json.loads(LOGS.read_text())
    for number, run in enumerate(logs):
        its = rows.filter(pa.compute.equal(rows["run"], number)).drop_columns(["run"])
        yield StoredRun(run["name"], run["options"], its, tuple(run["metrics"]))


def _cells(batch: RolloutBatch, values_T: Tensor, cast) -> list[list]:
    return [[cast(x) for x in row.tolist()] for row in values_T.split(batch.rows.diff().tolist())]


def _table(number: int, steps: list[Step]) -> pa.Table:
    parts = []
    for batch, _ in steps:
        count = len(batch)
        columns = {
            "run": pa.array([number] * count, pa.int32()),
            "step": pa.array([batch.step] * count, pa.int64()),
            "group_id": [batch.group_name(group) for group in batch.groups.index_N.tolist()],
            "sample_id": [batch.sample_name(row) for row in range(count)],
            "reward": batch.column("reward").tolist(),
            "status": batch.statuses,
            "micro_batch_id": pa.array(
                batch.per_row["micro_batch_id"].tolist() if "micro_batch_id" in batch.per_row else [None] * count,
                pa.int64(),
            ),
        }
        columns |= {name: pa.array(_cells(batch, batch.column(name), float), pa.list_(pa.float32())) for name in TOKENS}
        columns |= {name: pa.array(_cells(batch, batch.column(name), int), pa.list_(pa.uint8())) for name in MASKS}
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _made(slime, setup: Setup, fault: Fault, at: tuple[int, ...]) -> list[Step]:
    from parity.real_slime import slime_step

    steps = []
    for step in range(STEPS):
        batch, its = rows_of(setup, step), fault if step in at else NONE
        rows, metrics = slime_step(slime, setup, batch if its.record is None else its.record(batch), its)
        if setup.layout == "unrecorded":
            rows = replace(rows, per_row={name: x for name, x in rows.per_row.items() if name != "micro_batch_id"})
        steps.append((rows, {name: float(np.float32(value)) for name, value in metrics.items()}))
    return steps


def _all(slime) -> Iterator[tuple[str, Setup, list[Step]]]:
    for number in HEALTHY:
        setup = drawn("slime", number)
        yield f"healthy {number}", setup, _made(slime, setup, NONE, ())
    for number in FLAT:
        setup = drawn("slime", number, FLAT_REWARDS)
        yield f"healthy flat {number}", setup, _made(slime, setup, NONE, ())
    for name, case in CASES.items():
        setup = replace(SETUP, options={**SETUP.options, **case.setups.get("slime", {})})
        for strength, at in AT.items():
            yield f"{name}, {strength}", setup, _made(slime, setup, case.faults["slime"], at)


def main(checkout: Path) -> None:
    """Make all runs, and store them."""
    from parity.real_slime import slime_of

    tables, logs = [], []
    with slime_of(checkout) as slime:
        for number, (name, setup, steps) in enumerate(_all(slime)):
            tables.append(_table(number, steps))
            logs.append({"name": name, "options": setup.options, "metrics": [metrics for _, metrics in steps]})
    FOLDER.mkdir(exist_ok=True)
    pq.write_table(pa.concat_tables(tables), ROWS, compression="zstd", compression_level=19)
    lines = ",\n".join(json.dumps(log) for log in logs)
    LOGS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    import logging
    import warnings

    import torch

    # Threads add up in another order.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main(Path(sys.argv[1]))
