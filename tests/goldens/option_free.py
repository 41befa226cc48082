"""Right dumps that say nothing of their options: inputs and outputs of the real functions of every trainer.

A dump is what a trainer wrote under options that are kept apart from it. Nothing in it is wrong, but for the faults
that the release itself has, so that whatever is found without its options is found with them, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import torch
from goldens import golden_data as gold
from goldens import nemo_rl_cases, prime_rl_cases, real_results
from objectives import objective_of
from trainers.nemo_rl import test_goldens as test_nemo_rl
from trainers.prime_rl import test_goldens as test_prime_rl

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import PROMPT_LENGTH
from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.trainers.table import TRAINERS

REAL = ("areal", "miles", "ms-swift", "open-instruct", "openrlhf", "skyrl")


@dataclass(frozen=True)
class Dump:
    """What one configuration wrote.

    Attributes:
        name: of the configuration and its case.
        trainer: who wrote it.
        release: as its metadata say.
        options: those that it does not say.
        batches: its steps, with the advantages that were logged.
        metrics: logged values of each step; none: there is no log.
    """

    name: str
    trainer: str
    release: str
    options: Mapping[str, object]
    batches: tuple[RolloutBatch, ...]
    metrics: tuple[Mapping[str, float], ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.trainer}, {self.name}"

    def write(self, path: Path, *, stated: bool) -> Path:
        """Write a run file, and its log where there is one."""
        options = dict(self.options) if stated else {}
        metadata = RunMetadata(self.trainer, self.release, options).encode()
        table = pl.concat([frame_of(batch) for batch in self.batches]).to_arrow()
        pq.write_table(table.replace_schema_metadata(metadata), path)
        log = [
            {"step": batch.step, "split": "train", "name": name, "value": value}
            for batch, metrics in zip(self.batches, self.metrics, strict=False)
            for name, value in metrics.items()
        ]
        if log:
            pl.DataFrame(log).write_parquet(path.with_name(f"{path.stem}.metrics.parquet"))
        return path


def frame_of(batch: RolloutBatch) -> pl.DataFrame:
    """Return the rows of a step as a run file has them."""
    lengths = batch.rows.diff().tolist()
    columns: dict[str, object] = {
        "step": [batch.step] * len(batch),
        "sample_id": [str(batch.sample_name(row)) for row in range(len(batch))],
    }
    if batch.groups is not None:
        columns["group_id"] = [str(group) for group in batch.groups.index_N.tolist()]
    if batch.statuses:
        columns["status"] = list(batch.statuses)
    per_row = dict(batch.per_row)
    if PROMPT_LENGTH in per_row:
        # A batch has a number for each prompt, and its length; a file has its tokens.
        numbers, lengths_N = per_row.pop("prompt_ids").tolist(), per_row.pop(PROMPT_LENGTH).tolist()
        columns["prompt_ids"] = [[int(number)] * int(count) for number, count in zip(numbers, lengths_N, strict=True)]
    columns |= {name: values.tolist() for name, values in per_row.items()}
    for name, values in batch.per_token.items():
        numbers = values.to(torch.uint8) if values.dtype == torch.bool else values.float()
        columns[name] = [part.tolist() for part in numbers.split(lengths)]
    if batch.rewards:
        parts = {name: values.tolist() for name, values in batch.rewards.items()}
        columns["rewards"] = [dict(zip(parts, cells, strict=True)) for cells in zip(*parts.values(), strict=True)]
    masks = {name: pl.List(pl.UInt8) for name in columns if name.startswith("response_mask")}
    tokens = {name: pl.List(pl.Float32) for name in batch.per_token if name not in masks}
    prompts = {name: pl.List(pl.Int32) for name in columns if name == "prompt_ids"}
    return pl.DataFrame(columns, schema_overrides={**masks, **tokens, **prompts})


def dumps_of(trainer: str) -> Iterator[Dump]:
    """Every dump of one of `DUMPED`, configuration by configuration."""
    if trainer in REAL:
        yield from _real(trainer)
    elif trainer == "nemo-rl":
        yield from _nemo_rl()
    elif trainer == "prime-rl":
        yield from _prime_rl()
    else:
        yield from _stepwise(trainer)


def _real(trainer: str) -> Iterator[Dump]:
    folder = trainer.replace("-", "_")
    for (case, config), result in real_results.results(folder).items():
        if result.error is None:
            batch = real_results.batch_of(folder, case, torch.float32)
            advantage = torch.tensor(result.advantage["f32"])
            kind = "per_token" if len(advantage) == batch.tokens else "per_row"
            name = "advantages" if kind == "per_token" else "advantage"
            batch = replace(batch, **{kind: {**getattr(batch, kind), name: advantage}})
            logged = {name: value for name, value in result.scalars["f32"].items() if name != "loss"}
            spec = TRAINERS[trainer]
            release = spec.read_code[-1].name
            yield Dump(f"{config}, {case}", trainer, release, result.options, (batch,), (logged,))


def _computed(
    trainer: str, release: str, name: str, options: Mapping[str, object], batches: tuple[RolloutBatch, ...]
) -> Iterator[Dump]:
    """Dump what is computed here, where the stored results say that it is upstream's."""
    mine = objective_of(f"{trainer}@{release}", **options)
    logged = []
    for batch in batches:
        try:
            found = evaluate_rows(batch, mine)
        except CannotComputeError:
            continue
        if found.advantage_T is not None:
            logged.append(replace(batch, per_token={**batch.per_token, "advantages": found.advantage_T.float()}))
        else:
            logged.append(replace(batch, per_row={**batch.per_row, "advantage": found.advantage_N.float()}))
    if logged:
        yield Dump(name, trainer, release, options, tuple(logged))


def _nemo_rl() -> Iterator[Dump]:
    for case in nemo_rl_cases.SIZES:
        for label, options in nemo_rl_cases.ESTIMATORS.items():
            named = test_nemo_rl.estimator_options(options)
            if "reward_weights" in options:
                continue  # after the release
            yield from _computed("nemo-rl", "0.7.0", f"{label}, {case}", named, (test_nemo_rl.batch_of(case),))


def _prime_rl() -> Iterator[Dump]:
    for (config, case, precision), stored in test_prime_rl.stored().items():
        release, options, algorithm = prime_rl_cases.CONFIGS[config]
        if precision != "f32" or algorithm not in ("grpo", "max_rl"):
            continue
        version = TRAINERS["prime-rl"].read_code[-1].name if release == "HEAD" else release.removeprefix("v")
        named = {f"trainer.loss.{key}": value for key, value in options.items() if key != "filter_zero_advantages"}
        if "filter_zero_advantages" in options:
            named["orchestrator.train.filter_zero_advantages"] = options["filter_zero_advantages"]
        if algorithm != "grpo":
            named["orchestrator.algo.type"] = algorithm
        rows = prime_rl_cases.rows_of(case)
        batch = prime_rl_cases.batch_of(rows, None, torch.float32)
        batch = replace(batch, per_row={**batch.per_row, "advantage": torch.tensor(stored["advantage"])})
        logged = dict(zip(stored["names"], stored["values"], strict=True))
        logged = {name: value for name, value in logged.items() if name != "loss"}
        yield Dump(f"{config}, {case}", "prime-rl", version, named, (batch,), (logged,))


def _stepwise(trainer: str) -> Iterator[Dump]:
    """Advantages of TRL, verl, slime or Unsloth, which the stored results hold function by function."""
    configs = {config: slime_options(config) for config in SLIME} if trainer == "slime" else OTHERS
    release = "0.3.1" if trainer == "slime" else TRAINERS[trainer].newest
    for case in gold.CASES:
        batches = tuple(gold.batch(case, step, empty_rows=False) for step in gold.steps(case))
        for config, options in configs.items():
            if trainer in ("slime", config.partition(" ")[0]):
                yield from _computed(trainer, release, f"{config}, {case}", options, batches)


SLIME = (
    "grpo", "grpo|plain", "gspo", "reinforce_plus_plus", "reinforce_plus_plus|c0.1", "reinforce_plus_plus_baseline",
    "reinforce_plus_plus|g0.9", "ppo", "ppo|norm",
)  # fmt: skip
OTHERS: dict[str, dict[str, object]] = {
    "trl": {},
    "trl batch": {"scale_rewards": "batch"},
    "trl none": {"scale_rewards": "none"},
    "trl-rloo": {},
    "verl grpo": {"algorithm.adv_estimator": "grpo"},
    "verl nonorm": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
    "verl rloo": {"algorithm.adv_estimator": "rloo"},
    "verl opo": {"algorithm.adv_estimator": "opo"},
    "verl gpg": {"algorithm.adv_estimator": "gpg"},
    "verl rf": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "verl rfb": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "verl gae": {"algorithm.adv_estimator": "gae"},
    "unsloth": {},
    "unsloth none": {"scale_rewards": "none"},
}
DUMPED = (*REAL, "nemo-rl", "prime-rl", "slime", *dict.fromkeys(config.partition(" ")[0] for config in OTHERS))
"""Trainers of which there are dumps."""


def slime_options(config: str) -> dict[str, object]:
    """Return the options of a configuration such as ``ppo|c0.05|norm``."""
    estimator, *parts = config.split("|")
    options: dict[str, object] = {"advantage_estimator": estimator}
    for part in parts:
        match part[0]:
            case "c":
                options["kl_coef"] = float(part[1:])
            case "g":
                options["gamma"] = float(part[1:])
            case "p":
                options["grpo_std_normalization"] = False
            case _:
                options["normalize_advantages"] = True
    if estimator.startswith("reinforce"):
        options["normalize_advantages"] = True
    return options
