"""Runs made with this package's own evaluation, their logged numbers rounded to float32."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS


def objective_of(trainer: str, options) -> Objective:
    spec = TRAINERS[trainer]
    config = resolve(spec.options, parse_version(spec.newest), [Layer("test", options)], trainer=trainer)
    return spec.objective(config)


def batches(seed: int, *, steps=4, groups=5, size=6, longest=6, masked=0.15, levels=5, drift=0.05, functions=0):
    """Steps with groups of different rewards, fully masked responses, old and reference log-probs."""
    draw = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        count = groups * size
        lengths = draw.integers(1, longest + 1, count)
        rows = np.concatenate([[0], lengths.cumsum()])
        tokens = int(rows[-1])
        policy = -np.abs(draw.normal(0, 1, tokens)).astype("float32")
        mask = np.repeat(draw.random(count) > masked, lengths)
        rewards = {f"function {place}": torch.tensor(draw.random(count)) for place in range(functions)}
        yield RolloutBatch(
            step=step,
            rows=torch.tensor(rows),
            groups=Groups.of(torch.arange(count) // size),
            per_row={"reward": torch.tensor(draw.integers(0, levels, count) / (levels - 1) * 0.9).float().double()},
            rewards=rewards,
            per_token={
                "response_mask": torch.tensor(mask),
                "policy_log_probs": torch.tensor(policy),
                "old_log_probs": torch.tensor((policy + draw.normal(0, drift, tokens)).astype("float32")),
                "ref_log_probs": torch.tensor((policy + draw.normal(0, 0.3, tokens)).astype("float32")),
            },
            sample_ids=[f"{step}/{row}" for row in range(count)],
            group_ids=[f"{step}/{group}" for group in range(groups)],
        )


def logged(batch: RolloutBatch, objective: Objective, trainer: str) -> tuple[RolloutBatch, dict[str, float]]:
    """The step with advantages and metrics as a trainer would have logged them."""
    evaluation = evaluate(batch, objective)
    assert evaluation.rows is not None
    made = TRAINERS[trainer].metrics(evaluation) if evaluation.tokens is not None else {}
    metrics = {name: float(np.float32(made[name])) for name in made}
    if evaluation.rows.advantage_N is not None:
        columns = {"per_row": {**batch.per_row, "advantage": evaluation.rows.advantage_N.float().double()}}
    else:
        columns = {"per_token": {**batch.per_token, "advantages": evaluation.rows.advantage_T.float()}}
    return replace(batch, **columns), metrics


def run_of(trainer: str, objective: Objective, *, seed=1, config=None, named=True, **shape):
    """A run as `identify` reads it."""
    return as_run(
        trainer, [logged(batch, objective, trainer) for batch in batches(seed, **shape)], config=config, named=named
    )


def as_run(trainer: str, made, *, config=None, named=True):
    """Steps, each with its metrics, as `identify` reads a run."""
    steps = [batch for batch, _ in made]
    metrics = LoggedMetrics({batch.key: values for batch, values in made})
    columns = {"group_id", "sample_id", *steps[0].per_row, *steps[0].per_token}
    columns |= {"rewards"} if steps[0].rewards else set()

    def read(wanted, **options):
        return iter(steps)

    metadata = RunMetadata(trainer, TRAINERS[trainer].newest, config or {}) if named else RunMetadata()
    return SimpleNamespace(
        batches=read,
        metrics=metrics,
        metadata=metadata,
        columns=frozenset(columns),
        metrics_only=False,
        notes=ReaderNotes(),
    )


def without_options(source, target, *, trainer=True):
    """Copy a run file, its options taken out of what it says of itself."""
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    body = json.loads(table.schema.metadata[b"rolloutdoctor"])
    body["config"] = {}
    if not trainer:
        body.pop("trainer")
        body.pop("trainer_version")
    pq.write_table(table.replace_schema_metadata({"rolloutdoctor": json.dumps(body)}), target)
    log = source.with_name(f"{source.stem}.metrics.parquet")
    target.with_name(f"{target.stem}.metrics.parquet").write_bytes(log.read_bytes())
    return target
