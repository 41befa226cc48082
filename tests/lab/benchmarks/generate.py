"""Write a run that looks real: ragged lengths of 8 to 4,096 tokens, 3 % rejected rows, 30 % groups without spread."""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.io.metadata import RunMetadata

LOG_PROBS = ("policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")
METADATA = RunMetadata("trl", "1.16.0", {"beta": 0.04, "loss_type": "dapo", "num_generations": 16})


def write_run(path, *, tokens, steps=16, group=16, seed=0, ids=False):
    """Write about `tokens` tokens in `steps` steps of equal size; returns the exact number of tokens.

    With `ids` also advantages, token ids, prompts and finish reasons: all that a recorder writes of a run.
    """
    draw = np.random.default_rng(seed)
    rows_per_step = max(group, round(tokens / steps / 835 / group) * group)
    path = Path(path)
    written = 0
    writer = None
    for step in range(steps):
        table = _step(draw, step, rows_per_step, group)
        table = _with_ids(draw, table, group) if ids else table
        written += len(table.column("response_mask").combine_chunks().values)
        if writer is None:
            schema = table.schema.with_metadata(METADATA.encode())
            floats = [f"{name}.list.element" for name in LOG_PROBS]
            writer = pq.ParquetWriter(
                path, schema, compression="zstd", use_dictionary=["group_id"], use_byte_stream_split=floats
            )
        writer.write_table(table, row_group_size=1024)
    writer.close()
    return written


def _step(draw, step, rows, group):
    lengths = np.clip(draw.lognormal(6.4, 0.8, rows), 8, 4096).astype(np.int64)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    count = int(lengths.sum())
    policy = -draw.exponential(0.5, count).astype(np.float32)
    scales = {"policy_log_probs": 0.0, "old_log_probs": 0.02, "ref_log_probs": 0.1, "rollout_log_probs": 0.03}
    mask = np.ones(count, np.uint8)
    mask[np.repeat(draw.random(rows) < 0.03, lengths)] = 0
    group_of = np.arange(rows) // group
    reward = (draw.random(rows) < 0.5).astype(np.float64)
    reward[(draw.random(rows // group + 1) < 0.3)[group_of]] = 1.0
    columns = {
        "step": np.full(rows, step),
        "group_id": pa.array([f"{step}/{one}" for one in group_of]),
        "sample_id": pa.array([f"{step}/{row}" for row in range(rows)]),
        "reward": reward,
        "response_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
    }
    for name, scale in scales.items():
        noise = (scale * draw.standard_normal(count)).astype(np.float32)
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(np.minimum(policy + noise, 0)))
    return pa.table(columns)


def _with_ids(draw, table, group):
    mask = table.column("response_mask").combine_chunks()
    offsets, rows = mask.offsets, table.num_rows
    ids = draw.integers(3, 30_000, len(mask.values)).astype(np.int32)
    stopped = draw.random(rows) < 0.9
    ids[(offsets.to_numpy()[1:] - 1)[stopped]] = 2
    prompts = [draw.integers(3, 30_000, 32).tolist() for _ in range(rows // group)]
    reward = table.column("reward").to_numpy().reshape(-1, group)
    apart = reward - reward.mean(1, keepdims=True)
    advantage = (apart / (reward.std(1, ddof=1, keepdims=True) + 1e-4)).astype(np.float32)
    more = {
        "advantage": pa.array(advantage.reshape(-1)),
        "response_ids": pa.ListArray.from_arrays(offsets, pa.array(ids)),
        "prompt_ids": pa.array([prompts[row // group] for row in range(rows)], pa.list_(pa.int32())),
        "status": pa.array(np.where(stopped, "stop", "length")),
    }
    for name, column in more.items():
        table = table.append_column(name, column)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--tokens", type=int, default=15_000_000)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ids", action="store_true", help="advantages, token ids, prompts and finish reasons, too")
    options = parser.parse_args()
    print(write_run(options.path, tokens=options.tokens, steps=options.steps, ids=options.ids))
