"""Rows of logged numbers in the shapes that trackers and loops write, as one shape: a step, and numbers by name."""

from collections.abc import Iterator, Mapping

from rolloutdoctor.data.step_key import EVAL
from rolloutdoctor.importers.logs.numbers import is_list, is_number, number
from rolloutdoctor.importers.logs.printed import dict_in, name_of, values_of
from rolloutdoctor.importers.logs.rows import (
    MOST_NAMES,
    ROUNDS,
    RUNS,
    STEPS,
    has_mean_reward,
    is_of_update,
    of_rollouts,
)
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.metric_names.generic import generic, is_metric

_NAMES = ("name", "key", "metric", "metricName", "metric_name", "tag")
VALUES = ("value", "metricValue", "metric_value")
"""Columns of a row that holds one metric: MLflow's ``key``, Comet's ``metricName``, TensorBoard's ``tag``."""

_HOLDERS = frozenset(
    {"data", "metrics", "metric", "stats", "statistics", "logs", "log", "values", "scalars", "payload", "info"}
    | {"extra", "results", "ppo", "grpo", "rloo", "rl", "training", "update"}
)
"""Words in the name of an object that holds the metrics of its row, and says nothing of them: ``ppo_stats``."""

_OF_UPDATES = frozenset({"loss", "policy_loss", "critic_loss", "grad_norm", "learning_rate"})
"""Quantities that no rollout has."""

_PHASES = ("split", "phase", "mode", "type", "stage", "event", "log_type")
_HELD_OUT = frozenset({"eval", "evaluation", "val", "valid", "validation", "test"})
"""Names and words by which a row says that it is of an evaluation."""

_FEWEST = 2
_DEEPEST = 4
_LONGEST_WORD = 40
"""Characters of a text beside metrics: a time, a level, the name of a run; what is longer may be a response."""


def plain(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return a row with its metrics by name; one of another shape, or of a rollout, as it is.

    >>> plain({"run_id": "a", "key": "kl", "value": 0.1, "timestamp": 17, "step": 3})
    {'run_id': 'a', 'step': 3, 'name': 'kl', 'value': 0.1}
    >>> plain({"step": 3, "metrics": {"reward": 0.5, "kl": 0.1}, "train": {"loss": 0.2}})
    {'step': 3, 'reward': 0.5, 'kl': 0.1, 'train/loss': 0.2}
    """
    if "data" in row and row.keys() <= {"step", "data"}:
        return row
    if any(isinstance(word := row.get(name), str) and word.lower() in _HELD_OUT for name in _PHASES):
        row = {**{name: value for name, value in row.items() if name not in _PHASES}, "split": EVAL}
    step = next((name for name in STEPS if row.get(name) is not None), None)
    spelled = {name_of(name): name for name in row} if step is None and len(row) <= MOST_NAMES else {}
    if named := next((spelled[name] for name in STEPS if name in spelled and row[spelled[name]] is not None), None):
        step = name_of(named)
        row = {step if name == named else name: value for name, value in row.items()}
    if step is None:
        counter = next((name for name in ROUNDS if type(row.get(name)) is int), None)
        rest = {name: value for name, value in row.items() if name != counter}
        is_log = counter is not None and (has_mean_reward(rest) or is_of_update({*rest} - {"epoch"}) or is_episode(row))
        return {"step": row[counter], **rest} if is_log and counter is not None else row
    name = next((key for key in _NAMES if isinstance(row.get(key), str)), None)
    value = next((key for key in VALUES if key in row), None)
    if name is not None and value is not None and (parsed := number(row[value])) is not None:
        return {
            **{run: row[run] for run in (*RUNS, "split") if run in row},
            "step": row[step],
            "name": row[name],
            "value": parsed,
        }
    leaves = list(_leaves(row))
    if leaves == [*row.items()]:
        return row
    flat = {name: each for name, each in leaves if is_number(each) or is_list(each) or _is_word(each)}
    if len([name for name in flat if is_metric(name)]) < _FEWEST:
        return row
    # What a loop shows of a response beside the numbers of an update is left out; of itself it is a rollout.
    names = {name.rpartition("/")[2] for name, _ in leaves}
    is_of_rollout = bool(of_rollouts(names) - {"reward"}) or len(flat) < len(leaves)
    return row if is_of_rollout and not any(map(_is_of_update, flat)) else flat


def without_excerpts(row: Mapping[str, object]) -> Mapping[str, object]:
    """Return the numbers of a row that shows the beginning of a response: without all of it, it is no rollout.

    >>> without_excerpts({"step": 3, "reward": 0.5, "completion_preview": "So", "level": "easy"})
    {'step': 3, 'reward': 0.5}
    """
    is_cut = any(isinstance(value, str) and _EXCERPTS & {*name.lower().split("_")} for name, value in row.items())
    if not is_cut or of_rollouts(row.keys()) & {"response", "response_ids"} or not any(name in row for name in STEPS):
        return row
    cells = {name: value for name, value in row.items() if not of_rollouts([name]) - {"reward"}}
    return {name: value for name, value in cells.items() if name in (*RUNS, *STEPS, *_PHASES) or is_number(value)}


_EXCERPTS = frozenset({"preview", "snippet", "excerpt", "truncated"})
"""Words in the name of a text that is not whole."""


def _is_of_update(name: str) -> bool:
    metric = generic(name.rpartition("/")[2]) or generic(name)
    return metric is not None and metric.quantity in _OF_UPDATES


def is_episode(row: Mapping[str, object]) -> bool:
    """Tell a row of an episode: its number, a reward, and other numbers or words; no response.

    >>> is_episode({"episode": 3, "reward": 0.5, "level": "easy"}), is_episode({"episode": 3, "response": "a"})
    (True, False)
    """
    rest = {name: value for name, value in row.items() if name != "episode"}
    numbers = {name for name, value in rest.items() if isinstance(value, (int, float))}
    return (
        type(row.get("episode")) is int
        and any((metric := generic(name)) is not None and metric.quantity == "reward" for name in numbers)
        and of_rollouts(rest.keys()) <= {"reward"}
        and all(name in numbers or _is_word(value) for name, value in rest.items())
    )


def _is_word(value: object) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= _LONGEST_WORD)


def _leaves(row: Mapping[str, object], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    for name, each in row.items():
        value = parsed(each)
        if isinstance(value, dict) and depth < _DEEPEST:
            is_holder = _HOLDERS.issuperset(name.lower().split("_"))
            yield from _leaves(value, prefix if is_holder else f"{prefix}{name}/", depth + 1)
        else:
            yield f"{prefix}{name}", value


def parsed(value: object) -> object:
    """Return the object that a text holds, of JSON or of Python with numbers alone; what holds none as it is."""
    if not isinstance(value, str) or not value.startswith("{") or not value.endswith("}"):
        return value
    document = lines.document(value.encode())
    return document if isinstance(document, dict) else values_of(dict_in(value) or {}) or value
