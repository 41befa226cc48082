"""A row of names and numbers: its step, the names that tell it from a rollout, and its entries in a log."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from rolloutdoctor.data.schema import COLUMNS, Kind
from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Entry, numbers, of_splits
from rolloutdoctor.importers.logs.printed import OF_MEANS
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.metric_names.generic import generic
from rolloutdoctor.metric_names.table import names_with_a_split
from rolloutdoctor.results.errors import DataError

STEPS = (
    "step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "training_step",
    "train_step",
    # ms-swift's, in logging.jsonl and on the console: "5/16"
    "global_step/max_steps",
    # LLaMA-Factory's, in trainer_log.jsonl
    "current_steps",
    # ROLL's
    "system/step",
    "system/global_step",
    "steps",
    "iteration",
    "iter",
    # RLlib's
    "training_iteration",
    "update",
    "timesteps",
    # wandb's own counter, which grows with every call
    "_step",
)
"""Names under which loggers have the step, the best first."""

ROUNDS = ("episode", "epoch", "round")
"""Names of whole numbers that count the rows of a loop that counts no steps."""


def counter_of(row: Mapping[str, object], names: Sequence[str] = STEPS) -> tuple[str, int, int | None] | None:
    """Return under which name a row has its step, the step, and of how many where it says so; None if it has none.

    >>> counter_of({"step": "5/16"}), counter_of({"step": "final", "iter": 7.0}), counter_of({"step": 3.5})
    (('step', 5, 16), ('iter', 7, None), None)
    """
    for name in names:
        value = row.get(name)
        done, slash, total = value.strip().partition("/") if isinstance(value, str) else (value, "", "")
        step, of = _natural(done), _natural(total)
        if step is not None and bool(slash) == (of is not None):
            return name, step, of
    return None


def step_of(row: Mapping[str, object]) -> int | None:
    """Return the step of a row; None if it has none."""
    counter = counter_of(row)
    return None if counter is None else counter[1]


def _natural(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else None
    try:
        return cells.natural({"": value}, "", "")
    except DataError:
        return None


MOST_NAMES = 10_000
"""Names in a row of a log; the vocabulary of a tokenizer, which has all words, has more."""


OF_ROLLOUTS = frozenset({"group_id", "prompt", "completion", "response", "sample_id", "uid"})
"""Columns that no log has: with a row for each response, the last one of a step would stand for all."""

OF_UPDATES = frozenset({"loss", "grad_norm", "learning_rate", "epoch"})
"""Metrics that no rollout has."""


def of_rollouts(names: Collection[str]) -> set[str]:
    """Return the columns of a rollout that some names are, but for those that metrics share."""
    columns = {column for column in COLUMNS if any(name in names for name in (column.name, *column.aliases))}
    return {column.name for column in columns if column.kind is not Kind.FLOATS} - {"step", "split"}


def is_log_row(names: Collection[str]) -> bool:
    """Tell the names of a row of logged numbers from those of a rollout: some have a slash, or are of means."""
    named = [name for name in names if name not in STEPS]
    if any("/" in name for name in named) or is_of_update(names):
        return True
    return of_rollouts(names) <= {"reward"} and any(generic(name) and not of_rollouts([name]) for name in named)


def is_of_update(names: Collection[str]) -> bool:
    """Tell names of which one is a metric that no rollout has, and none is of a rollout but rewards."""
    return of_rollouts(names) <= {"reward", "rewards"} and any(name in OF_UPDATES for name in names)


OF_TRAINER = {"epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "reward", "kl"}
"""Names that the transformers Trainer and TRL log; a row of `log_history` has some of them beside its step."""


RUNS = (
    *("run", "run_id", "run_name", "_runid", "runid", "exp_name", "experiment_id"),
    *("algo", "algorithm", "method", "variant", "arm", "condition"),
)
"""Names under which a row says which run it is of, the best first."""


LONG = frozenset({"step", "name", "value"})
"""Names of a row that holds one metric; without one of them it holds none."""


def is_long(row: Mapping[str, object]) -> bool:
    """Tell a row that holds one metric: its step, name and value."""
    return LONG <= set(row) <= LONG | {"split", *RUNS}


def has_mean_reward(row: Mapping[str, object]) -> bool:
    """Tell a row with a mean of rewards, which no response has, and no response: lists beside it are of its step."""
    means = [name for name, value in row.items() if isinstance(value, (int, float)) and OF_MEANS.search(name.lower())]
    of_response = of_rollouts(row.keys()) & {"response", "response_ids", "response_mask"}
    return not of_response and any((metric := generic(name)) and metric.quantity in _REWARDS for name in means)


_REWARDS = ("reward", "held_out_reward")


_REPORTED = re.compile(
    r"(train|eval)/(epoch|learning_rate|reward|reward_std|frac_reward_zero_std|kl|(rewards|completions|clip_ratio)/.*)"
)
"""Names that the transformers Trainer alone reports, where a table of them has lost its step."""

LENGTHS = ("max_steps", "total_steps", "total_training_steps")
"""Names under which a row has the steps that the run was planned for."""

_NO_METRICS = frozenset({*STEPS, "split"})


def entries_of(row: Mapping[str, object], where: str, notes: LogNotes, *, is_printed: bool = False) -> Iterator[Entry]:
    """Yield what a row of names and values logs.

    Args:
        row: a row, with a step.
        where: file, and line, row or record.
        notes: takes the length of the run, and which means are read.
        is_printed: whether the transformers Trainer may have logged it, as ``kl`` and ``eval_kl``.

    Raises:
        DataError: if it has no step.
    """
    counter = counter_of(row)
    if counter is None:
        named = next((name for name in STEPS if row.get(name) is not None), None)
        if named is not None:
            cells.natural(dict(row), named, where)
        raise DataError(f"{where}: no step; the number of the optimizer step has to be in one of {', '.join(STEPS)}")
    _, step, total = counter
    for length in (total, *map(row.get, LENGTHS)):
        notes.planned(length)
    data = row.get("data")
    if isinstance(data, dict):
        yield step, TRAIN, notes.without_texts(numbers(data), where)
        return
    notes.conversions_of(row, where)
    own_split = EVAL if row.get("split") == EVAL else TRAIN
    if is_long(row):
        yield step, own_split, {str(row["name"]): cells.number(row["value"], f"{where}: value")}
        return
    # The transformers Trainer reports to wandb and others as train/kl and eval/kl, beside its own step.
    is_reported = "train/global_step" in row or (
        any(map(_REPORTED.fullmatch, row)) and row.keys().isdisjoint(names_with_a_split())
    )
    evaluations = "eval_" if is_printed and OF_TRAINER & row.keys() else "eval/" if is_reported else ""
    values = {name: value for name, value in row.items() if name not in _NO_METRICS and not name.startswith("_")}
    for split, of_split in of_splits(numbers(values), evaluations, own_split):
        yield step, split, notes.without_texts(of_split, where)
