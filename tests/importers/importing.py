"""Import a dump and look at the rows; a slime dump to the documented layout (not written by slime itself)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.small_files import once
from rolloutdoctor.io.run import open_run
from rolloutdoctor.opening.dumps import ConvertOptions, convert, detect_dump
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.rules.table import pick

DATA = Path(__file__).parent / "data"


@contextmanager
def in_small_pieces(chunk_bytes: int, *, by_orjson: bool = True) -> Iterator[None]:
    """Read JSON Lines in small chunks; by Python's `json` alone if not by `orjson`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", chunk_bytes)
        if not by_orjson:
            patch.setattr(lines, "_loaded", partial(json.loads, object_pairs_hook=once))
        yield


def bytes_of(path: Path) -> tuple[list[str], bytes]:
    """Column names and rows of a Parquet file, in bytes of Arrow: Parquet keeps every bit of a float."""
    stream = pa.BufferOutputStream()
    table = pq.read_table(path).combine_chunks()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return table.schema.names, stream.getvalue().to_pybytes()


def converted(target: Path, *sources: Path, **options: object):
    """Rows as records, and the sink."""
    chosen = ConvertOptions(**options)
    found = detect_dump([str(source) for source in sources], chosen)
    assert found is not None, "no importer knows it"
    sink = convert(found, target, chosen)
    return pq.read_table(target).to_pylist(), sink


def findings(*sources: Path, trainer: str | None = None, select: Sequence[str] = (), **options: object):
    """What check finds in a dump that is opened directly."""
    with open_any(
        [str(source) for source in sources], trainer=None, options=ConvertOptions(**options), tell=lambda text: None
    ) as run:
        return comparable(check(run, CheckOptions(trainer=trainer, device="cpu", rules=pick(select, []))))


def findings_of_run(path: Path, trainer: str | None = None):
    """What check finds in a run file."""
    return comparable(check(open_run([str(path)]), CheckOptions(trainer=trainer, device="cpu")))


def comparable(report):
    return replace(report, config={})


def slime_dump(
    folder: Path,
    rollouts=(0, 1),
    groups=2,
    size=3,
    train: Mapping[str, object] | None = None,
    rollout: Mapping[str, object] | None = None,
):
    """Two data-parallel ranks, shuffled over; row 2 of each rollout was removed, so its mask is zero."""
    for name in ("train_data", "rollout_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in rollouts:
        draw = torch.Generator().manual_seed(number)
        samples, trained = [], []
        for row in range(groups * size):
            length = 2 + row % 3
            logps = -torch.rand(length, generator=draw)
            sample = {
                "group_index": 10 * number + row // size,
                "index": 100 * number + row,
                "tokens": list(range(7, 10 + length)),
                "response_length": length,
                "reward": float(row % 2),
                "loss_mask": None,
                "rollout_log_probs": logps.tolist(),
                "remove_sample": row == 2,
                "status": "truncated" if row == 1 else "completed",
            }
            samples.append(sample | dict(rollout or {}))
            trained.append(
                {
                    "data_parallel_rank": row % 2,
                    "sample_index": 100 * number + row,
                    "rollout_position": row,
                    "tokens": torch.tensor(sample["tokens"]),
                    "response_lengths": length,
                    "rewards": 9.0,
                    "truncated": int(row == 1),
                    "loss_masks": torch.full((length,), int(row != 2), dtype=torch.int),
                    "rollout_log_probs": logps,
                    "log_probs": logps + 0.01,
                    "ref_log_probs": logps - 0.1,
                    "advantages": torch.full((length,), 0.5),
                    "returns": torch.full((length,), 0.5),
                }
                | dict(train or {})
            )
        body = {"format_version": 2, "rollout_id": number, "rank": 0, "samples": trained[::-1]}
        torch.save(body | {"raw_reward": [8.0] * len(samples)}, folder / "train_data" / f"{number}.pt")
        torch.save({"rollout_id": number, "samples": samples}, folder / "rollout_data" / f"{number}.pt")
    return folder


def prime_rl_output(folder: Path, run: str, *, traces: bool = True, **options: object) -> Path:
    """A run of `prime_rl_runs.parquet` as prime-rl writes it: metrics, configurations, token exports and traces.

    Sequences of an advantage of 0 are not shipped, and so neither exported nor in the effective traces.
    """
    import polars as pl

    rows = pl.read_parquet(DATA / "prime_rl_runs.parquet").filter(pl.col("run") == run).to_dicts()
    folder.mkdir(parents=True)
    configs = {
        "trainer": {"loss": {"type": "default", "adv_tau": 1.0, "kl_tau": 1e-3}, "enable_token_export": True},
        "orchestrator": {"algo": {"type": "grpo", "length_penalty": None}, "group_size": 8},
    }
    configs["orchestrator"]["train"] = {"filter_zero_advantages": True, "source": [{"name": "gsm8k", "algo": None}]}
    configs["trainer"]["loss"] |= options
    (folder / "configs").mkdir()
    for name, body in configs.items():
        (folder / "configs" / f"{name}.json").write_text(json.dumps(body))
    with (folder / "metrics.jsonl").open("w") as log:
        for row in {row["step"]: row for row in rows}.values():
            log.write(json.dumps({"step": row["step"], "time": 1.0, "optim/grad_norm": 0.5, "optim/lr": 1e-6}) + "\n")
            log.write(json.dumps({"step": row["step"], "time": 1.0, **json.loads(row["metrics"])}) + "\n")
    for number, row in enumerate(row for row in rows if row["advantage"] != 0.0):
        prompt = [5, 6, row["group"]]
        count, sampled = len(row["ids"]) + len(prompt), list(zip(row["sampler"], row["mask"], strict=True))
        export = {
            "schema_version": 1,
            **{"step": row["step"], "rank": row["rank"], "micro_step": row["micro"], "export_sequence_idx": number},
            "token_ids": prompt + row["ids"],
            "loss_mask": [False] * len(prompt) + row["mask"],
            "advantages": [row["advantage"]] * count,
            "inference_logprobs": [0.0] * len(prompt) + [value if kept else 0.0 for value, kept in sampled],
            "trainer_logprobs": [-1.0] * len(prompt) + row["policy"],
            "entropy": [1.0] * len(prompt) + row["entropy"],
        }
        place = folder / "token_exports" / f"step_{row['step']}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "STABLE").touch()
        with (place / f"rank_{row['rank']}.jsonl").open("a") as file:
            file.write(json.dumps(export) + "\n")
        kept = [value for value, on in sampled if on]
        nodes = [
            {"token_ids": prompt, "mask": [False] * 3, "logprobs": []},
            {"parent": 0, "token_ids": row["ids"], "mask": row["mask"], "logprobs": kept},
        ]
        nodes[1]["advantages"] = [row["advantage"]] * len(kept)
        trace = {"id": str(number), "nodes": nodes, "rewards": {"correct": {"score": row["reward"], "weight": 1.0}}}
        episode = {
            "task": {},
            "group": {"id": f"{row['step']}-{row['group']}"},
            "run": {"id": "run", "work": {"policy": {"start": row["step"] - 1, "end": row["step"] - 1}}},
            "traces": [trace],
        }
        if traces:
            place = folder / "rollouts" / f"step_{row['step']}" / "train" / "effective"
            place.mkdir(parents=True, exist_ok=True)
            with (place / "traces.jsonl").open("a") as file:
                file.write(json.dumps(episode) + "\n")
    return folder
