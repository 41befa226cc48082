"""prime-rl's traces: `rollouts/step_{N}/{train,eval}/effective/traces.jsonl`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.trainers.prime_rl.trace_branches import TOKENS, branches, error_text, plain_text

_PLACE = re.compile(r"step_(\d{1,18})/(train|eval)/(all|effective)/traces\.jsonl")
_KEYS = {"task", "traces"}


class PrimeRlTraces:
    """The episodes that prime-rl's file monitor writes, one row for each branch of a trace that is trained.

    Written by ``FileMonitor.log_episodes`` (src/prime_rl/monitors/file.py) as ``Episode.to_record`` of verifiers
    (verifiers/v1/episode.py), since prime-rl 9975d8868; read and compared with prime-rl 559b44772 and verifiers
    a60a606e. `step` and `split` are those of the path: the step inside a record is the one at which the work was sent
    out. `effective` is what was trained on; `all` has rejected and failed work besides, and every effective episode
    too, so it is read only if the file itself is given. The reward is the sum of the weighted rewards, as in
    ``Trace.reward``; the group is the episode's. Messages form a graph: see `trace_branches`; the rows of a trace share
    its `trajectory_id`, and `turns` says who wrote them. There are no log-probs of the trainer.
    A run that resumes appends to the steps that it repeats. Its episodes have another run's id, unless PRL_RUN_ID gave
    both the same: of several runs in a file the last one counts, and the rows of the others are counted as repeated.
    """

    name = "prime-rl-traces"
    summary = "prime-rl's rollouts/step_*/train/effective/traces.jsonl"
    logs_beside = True
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "old_log_probs": "the trainer's log-probs are in the token export: trainer.enable_token_export=true",
        "policy_log_probs": "the trainer's log-probs are in the token export: trainer.enable_token_export=true",
        "*": "prime-rl's traces do not hold it: record with rolloutdoctor.recorders.own_loop",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the path and the keys of the first line."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        if first is None or not first.keys() >= _KEYS or not isinstance(first["traces"], list):
            return None
        return f"{'the file' if path.is_file() else 'the first traces.jsonl'} has episodes with a task and traces"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their steps; one step and split is in memory at a time."""
        base.only_columns(self.name, options, ())
        files = folders.named(sources, _files)
        files.sort(key=lambda file: natural_key(_place(file)[0]))
        for file in files:
            step, split, _ = _place(file)[1:]
            if sum(_place(other)[1:3] == (step, split) for other in files) > 1:
                raise InputError(f"{file.name}: several files of step {step}, split {split}; give one run and subset")
        total = sum(Path(file.path).stat().st_size for file in files)
        branched = repeated = 0
        for file, chunks in groupby(lines.chunks(files), lambda chunk: chunk.file):
            labelled = _rows(file, chunks, sink, total)
            rows = of_last_run(labelled)
            if rows:
                if not sink.rows:
                    sink.begin(RunMetadata(trainer="prime-rl"))
                if len(rows) < len(labelled):
                    sink.fact(*_place(file)[1:3], base.REPEATED_ROWS, len(labelled) - len(rows))
                    repeated += 1
                branched += any(row["response_ids"] is None for row in rows)
                _write(file, rows, sink)
        sink.advance(total, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no traces in prime-rl's rollouts/step_*/train/effective there")
        if repeated:
            sink.note(f"{repeated} steps were written more than once, by a run that resumed; the last time counts")
        if branched:
            sink.note(f"{branched} steps have traces without a sampled token, and are read without their tokens")


def trained_rows(file: Path) -> list[dict[str, object]]:
    """The rows of a file of effective traces, but for their step and split; of several runs those of the last."""
    labelled: list[tuple[object, dict[str, object]]] = []
    for line in lines.objects(Source.of(str(file))):
        if line.body is not None:
            run, rows = episode_rows(line.body, line.where)
            labelled += [(run, row) for row in rows]
    return of_last_run(labelled)


def of_last_run(labelled: Sequence[tuple[object, dict[str, object]]]) -> list[dict[str, object]]:
    """The rows that the run wrote that wrote last; a run that resumes repeats steps."""
    return [row for run, row in labelled if run == labelled[-1][0]]


def _rows(
    file: Source, chunks: Iterable[lines.Chunk], sink: base.RunSink, total: int
) -> list[tuple[object, dict[str, object]]]:
    """The rows of a file, each with the id of the run that wrote it."""
    _, step, split, _ = _place(file)
    labelled: list[tuple[object, dict[str, object]]] = []
    torn = 0
    for chunk in chunks:
        for line in lines.objects_of(chunk):
            if line.body is None:
                sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                torn += 1
            else:
                run, rows = episode_rows(line.body, line.where)
                labelled += [(run, row | {"step": step, "split": split}) for row in rows]
        sink.advance(chunk.bytes_read, total)
    if torn and labelled:
        sink.fact(step, split, base.TORN_LINES, torn)
    return labelled


def is_of_prime_rl(file: Path) -> bool:
    """Tell by its path whether a file of traces is of a step of prime-rl."""
    return _PLACE.search(file.absolute().as_posix()) is not None


def episode_rows(body: dict[str, object], where: str) -> tuple[object, list[dict[str, object]]]:
    """Return the id of the run that wrote an episode, and a row for each of its traces.

    Raises:
        DataError: if a field does not fit.
    """
    traces = body.get("traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, dict) for trace in traces):
        raise DataError(f"{where}: traces is {cells.shown(traces)} where a list of objects was expected")
    rows = [row for number, trace in enumerate(traces) for row in _rows_of(body, trace, f"{where}, trace {number}")]
    return _object(body.get("run")).get("id"), rows


def _rows_of(episode: Mapping[str, object], trace: Mapping[str, object], where: str) -> list[dict[str, object]]:
    """Return a row for each branch that is trained; one without tokens where nothing is."""
    row = _row(episode, trace, where)
    nothing: list[dict[str, object]] = [{}]
    parts = branches(trace, where) or nothing
    return [
        row
        | {"sample_id": row["sample_id"] if not place else f"{row['sample_id']}/{place}"}
        | {name: tokens.get(name) for name in TOKENS}
        for place, tokens in enumerate(parts)
    ]


def _row(episode: Mapping[str, object], trace: Mapping[str, object], where: str) -> dict[str, object]:
    group = _object(episode.get("group")).get("id")
    if group is None:
        raise DataError(f"{where}: its episode has no group, and so its reward no baseline to compare with")
    policy = _object(_object(_object(episode.get("run")).get("work")).get("policy"))
    status = trace.get("stop_condition")
    errors = trace.get("errors")
    identity = plain_text(trace.get("id"))
    return {
        "group_id": plain_text(group),
        "task_id": _task(episode, trace),
        "sample_id": identity,
        "trajectory_id": int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "little") >> 1,
        "reward": _reward(trace, where),
        "status": None if status is None else plain_text(status),
        "policy_version_min": None if "start" not in policy else cells.natural(policy, "start", where),
        "policy_version_max": None if "end" not in policy else cells.natural(policy, "end", where),
        "error": error_text(errors[-1]) if isinstance(errors, list) and errors else None,
    }


def _task(episode: Mapping[str, object], trace: Mapping[str, object]) -> str | None:
    """Return what tells a task in any step: its key, its hash, or its number; None where the records have none."""
    for task in (_object(trace.get("task")), _object(episode.get("task"))):
        data = _object(task.get("data"))
        names = [name for name in (task.get("key"), task.get("hash"), data.get("idx")) if name is not None]
        if names:
            # Environments number their tasks alike.
            env = _object(episode.get("env")).get("id")
            return plain_text(names[0] if env is None else f"{env}/{names[0]}")
    return None


def _reward(trace: Mapping[str, object], where: str) -> float | None:
    rewards = trace.get("rewards", {})
    if not isinstance(rewards, dict):
        raise DataError(f"{where}: rewards is {cells.shown(rewards)} where an object was expected")
    total, scored = 0.0, not rewards
    for name, reward in rewards.items():
        if reward is not None:
            score = cells.number(_object(reward).get("score"), f"{where}: rewards.{name}")
            weight = cells.number(_object(reward).get("weight", 1.0), f"{where}: rewards.{name}")
            if score is None or weight is None:
                raise DataError(f"{where}: rewards.{name} is {cells.shown(reward)} where a score was expected")
            total, scored = total + score * weight, True
    return total if scored else None


def _write(file: Source, rows: Sequence[Mapping[str, object]], sink: base.RunSink) -> None:
    sink.write_from(file, written_columns(rows))


def written_columns(rows: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return the columns of some rows; those of tokens are there for every row, or for none."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    bare = any(ids is None for ids in columns["response_ids"])
    for name in TOKENS:
        # A token column is there for every row of a step and split, or for none of them.
        if bare or any(cell is None for cell in columns[name]):
            columns[name] = [None] * len(rows)
    return columns


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _place(file: Source) -> tuple[str, int, str, str]:
    """Return the place of a file: the end of its path, its step, split and subset."""
    match = _PLACE.search(Path(file.path).absolute().as_posix())
    if match is None:
        raise InputError(
            f"{file.name}: prime-rl writes step_N/train/effective/traces.jsonl; the step is known from the directory"
        )
    return match[0], int(match[1]), match[2], match[3]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name == "traces.jsonl" else []
    patterns = ("step_*/*/effective", "*/effective", "effective", "")
    for root in (path / "rollouts", path):
        for pattern in patterns:
            files = list(root.glob(f"{pattern}/traces.jsonl" if pattern else "traces.jsonl"))
            files = [file for file in files if _PLACE.search(file.absolute().as_posix()) and file.is_file()]
            if files:
                return sorted(files, key=lambda file: natural_key(str(file)))
    return []
