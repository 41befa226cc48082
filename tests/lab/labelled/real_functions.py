"""Runs of verl's and slime's real functions, and of a synthetic model: clean ones and faults."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from calibration.faults import CASES as SAMPLED
from calibration.faults import Run as Batches
from parity.real_draws import drawn, with_policy_loss, with_rollout_correction
from parity.real_faults import CASES as VERL_CASES
from parity.real_faults import setup_of
from parity.real_runs import real_run, resolved
from parity.real_setup import NONE, STEPS, Fault, Setup
from parity.slime_runs import stored

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.writer import RunWriter, metrics_path, write_metrics

Metrics = Mapping[str, float]

CODES = {
    "groups by position": ("RDI003",),
    "groups tiled": ("RDI003",),
    "group is the batch": ("RDI003",),
    "rewards one row late": ("RDI004",),
    "rewards sorted": ("RDI004",),
    "rewards of eight rows late": ("RDI004",),
    "missing reward as 0": ("RDA005",),
    "biased std": ("RDA004",),
    "another epsilon": ("RDA004",),
    "not divided by std": ("RDI014",),
    "rewards as they are": ("RDI014",),
    "whitened": ("RDI014",),
    "leave one out": ("RDI014",),
    "old log-probs one token late": ("RDI008",),
    "ref log-probs one token late": ("RDI008",),
    "ref log-probs late, 0 first": ("RDI008",),
    "KL is k1": ("RDG007",),
    "KL is k2": ("RDG007",),
    "KL twice in the loss": ("RDG009", "RDG005"),
    "KL in reward and loss": ("RDG009",),
    "KL clamped": ("RDG008",),
    "loss by micro-batch": ("RDG006",),
    "loss is a token mean": ("RDI014",),
    "loss is a mean of rows": ("RDI014", "RDG006"),
    "denominator counts dropped rows": ("RDG010",),
    "metric times 3": ("RDM007",),
    "metric is a mean of rows' means": ("RDM005",),
    "ratio against the sampler": ("RDO006",),
    "ratio is one": ("RDO006",),
}
"""Rules that name the faults of `parity.real_faults` and of slime's stored runs."""

VERSIONS = {"verl": "0.9.1", "trl": "1.16.0"}

AT = {"weak": (3,), "middle": (1, 3, 5), "strong": tuple(range(STEPS))}
"""Steps with the fault."""

ROWS = (
    *("RDO001", "RDO007", "RDO008", "RDO009", "RDO011", "RDO013", "RDO014", "RDI010", "RDI015", "RDI016", "RDI017"),
    *("RDA012", "RDA013", "RDA015", "RDG015", "RDT011"),
)
"""Faults of rows that no run of a real trainer here can have."""


def _in_actor(name: str, value: object) -> Fault:
    return Fault(options={f"actor_rollout_ref.actor.{name}": value})


VERL_MORE = {
    "clip_ratio_high ignored": (_in_actor("clip_ratio_high", 0.05), ("RDG005", "RDI014")),
    "KL coefficient of the loss dropped": (_in_actor("kl_loss_coef", 0.0), ("RDI014", "RDG005")),
    "KL coefficient with the other sign": (_in_actor("kl_loss_coef", -0.05), ("RDG005", "RDG009")),
    "score metric times the ranks": (
        Fault(log=lambda metrics, update, batch: {**metrics, "critic/score/mean": 8 * metrics["critic/score/mean"]}),
        ("RDM007", "RDM006"),
    ),
}
"""Faults of verl beside those of `parity.real_faults`."""


@dataclass(frozen=True)
class Planted:
    """A fault of verl, slime or a synthetic model at some strengths.

    Attributes:
        name: what is wrong.
        expected: codes of the rules that name it.
        words: what its strength is.
        makers: strength to what writes the run.
        information: a finding that is information alone names it, too.
        planted: strength to the size of the effect in the unit of its rule's bound, where it is known.
    """

    name: str
    expected: tuple[str, ...]
    words: str
    makers: Mapping[str, Callable[[Path], None]]
    information: bool = False
    planted: Mapping[str, float] = field(default_factory=dict)


def write(
    path: Path, trainer: str, options: Mapping[str, object], steps: Sequence[tuple[RolloutBatch, Metrics]]
) -> None:
    """Write rows and logged metrics as a run file that records every option."""
    config = {name: one.value for name, one in resolved(trainer, options).settings.items()}
    with RunWriter(path, RunMetadata(trainer, VERSIONS[trainer], config)) as writer:
        for batch, _ in steps:
            writer.write(_columns(batch))
    logged = [(batch.step, "train", name, value) for batch, metrics in steps for name, value in metrics.items()]
    if logged:
        write_metrics(metrics_path(path), logged)


def _columns(batch: RolloutBatch) -> dict[str, object]:
    count, lengths = len(batch), batch.rows.diff().tolist()
    found: dict[str, object] = {"step": [batch.step] * count}
    if batch.groups is not None:
        found["group_id"] = [batch.group_name(group) for group in batch.groups.index_N.tolist()]
    found["sample_id"] = [batch.sample_name(row) for row in range(count)]
    for name, column_N in batch.per_row.items():
        if name not in ("prompt_ids", "prompt_length"):
            found[name] = column_N.tolist()
    if "prompt_ids" in batch.per_row:
        tokens = batch.per_row.get("prompt_length", batch.per_row["prompt_ids"] * 0 + 4).tolist()
        found["prompt_ids"] = [
            np.full(length, prompt, np.int32)
            for prompt, length in zip(batch.per_row["prompt_ids"].tolist(), tokens, strict=True)
        ]
    for name, column_T in batch.per_token.items():
        if name == "entropy" and batch.has("ref_log_probs"):
            # Of the rows for real functions: drawn, and of no distribution.
            continue
        cells_T = column_T.int() if name == "response_ids" else column_T
        found[name] = [row.numpy() for row in cells_T.split(lengths)]
    if batch.rewards:
        names = list(batch.rewards)
        found["rewards"] = [
            dict(zip(names, row, strict=True))
            for row in zip(*(x.tolist() for x in batch.rewards.values()), strict=True)
        ]
    if batch.statuses:
        found["status"] = list(batch.statuses)
    return found


def _verl(setup: Setup, fault: Fault, at: Sequence[int], path: Path) -> None:
    write(path, setup.trainer, setup.options, real_run(setup, fault, at))


def verl_clean() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Drawn configurations, some with another policy loss or with corrections for the sampler."""
    modes = ("gspo", "clip_cov", "geo_mean")
    for number in range(24):
        setup = drawn("verl", number)
        if number % 4 == 1:
            setup = with_rollout_correction(setup, number)
        elif number % 8 == 3:
            setup = with_policy_loss(setup, modes[number % 3])
        # A sampler that is farther off, or a step that is longer, is a finding of its own.
        setup = replace(setup, drift=min(setup.drift, 0.05), sampled=0.01)
        yield f"{number:03} {setup.options['algorithm.adv_estimator']}", partial(_verl, setup, NONE, ())


def verl_kinds() -> Iterator[Planted]:
    """Faults of verl."""
    more = {name: (fault, expected, SETUP) for name, (fault, expected) in VERL_MORE.items()}
    cases = {
        name: (case.faults["verl"], CODES[name], setup_of(case, "verl"))
        for name, case in VERL_CASES.items()
        if name in CODES and "verl" in case.faults
    }
    for name, (fault, expected, setup) in {**cases, **more}.items():
        makers = {strength: partial(_verl, setup, fault, at) for strength, at in AT.items()}
        yield Planted(f"verl: {name}", expected, "faulty steps of 6: 1, 3, 6", makers)


SETUP = setup_of(VERL_CASES["KL is k2"], "verl")


@cache
def _slime() -> Mapping[str, object]:
    return {run.name: run for run in stored()}


def _slime_run(name: str, path: Path) -> None:
    run = _slime()[name]
    # Drawn, as verl's.
    replace(run, rows=run.rows.drop_columns(["entropy"])).write(path)


def slime_clean() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """The stored runs without a planted fault whose numbers are defined."""
    for name in _slime():
        if name.startswith("healthy") and name not in ("healthy flat 6", "healthy flat 57"):
            yield name.removeprefix("healthy "), partial(_slime_run, name)


def slime_kinds() -> Iterator[Planted]:
    """Faults of slime."""
    names = dict.fromkeys(name.rpartition(", ")[0] for name in _slime() if "healthy" not in name)
    for name in names:
        if name in CODES:
            makers = {
                strength: partial(_slime_run, f"{name}, {stored_as}")
                for strength, stored_as in (("weak", "mild"), ("strong", "severe"))
            }
            yield Planted(f"slime: {name}", CODES[name], "faulty steps of 6: 1, 6", makers)


def _sampled(code: str, strength: float, path: Path) -> None:
    case = next(each for each in SAMPLED if each.code == code)
    batches: Batches = case.make(strength, 10_000)
    if code.startswith("RDA"):
        # Their log-probs are all alike, which is another fault.
        batches = [_without(batch, "rollout_log_probs") for batch in batches]
    write(path, case.trainer, case.options, [(batch, {}) for batch in batches])


def _without(batch: RolloutBatch, column: str) -> RolloutBatch:
    return replace(batch, per_token={name: x_T for name, x_T in batch.per_token.items() if name != column})


def sampled_kinds() -> Iterator[Planted]:
    """Faults in rows of a synthetic model."""
    for case in SAMPLED:
        if case.code in ROWS:
            chosen = case.strengths[0], case.strengths[len(case.strengths) // 2], case.strengths[-1]
            makers = {strength: partial(_sampled, case.code, value) for strength, value in zip(AT, chosen, strict=True)}
            yield Planted(
                f"rows: {case.words}",
                (case.code,),
                f"{chosen[0]:g}, {chosen[1]:g}, {chosen[2]:g}",
                makers,
                not case.warns,
                {s: case.planted(value) for s, value in zip(AT, chosen, strict=True)} if case.planted else {},
            )
