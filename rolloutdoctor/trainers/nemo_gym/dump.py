"""NeMo Gym's rollouts: the JSON Lines of `output_jsonl_fpath`, a rollout a line."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.mapped_lines import value_at
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.trainers.nemo_gym.calls import TOKENS, as_object, failed_tools, pieces

_TASK, _ROLLOUT, _ATTEMPT, _ID = "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id"
_KEYS = frozenset({_TASK, _ROLLOUT, "response", "reward"})
_BESIDE = ("_failures.jsonl", "_materialized_inputs.jsonl")


@dataclass(frozen=True)
class _Rollout:
    """A line: where it is, its step and split, its name in the collection, the id of its response, and its rows."""

    file: Source
    step: int
    split: str
    name: str
    response: object
    rows: Sequence[Mapping[str, object]]


class NemoGymRollouts:
    """Rollouts that NeMo Gym collects, a row each, or one for each contiguous piece of its tokens (`calls.pieces`).

    Written by ``RolloutCollectionHelper.run_from_config`` (nemo_gym/rollout_collection.py), since v0.2.0; read and
    compared with the writer of 07d6b0d0, and tokens with those that NeMo-RL 7ea279abf makes of the same lines. The
    rollouts of one `_ng_task_index` are a group. Nothing says a step: all rows are evaluation rows of step 0, unless
    ``--map step=FIELD`` names a field of the lines: then they are training rows. Token ids and the sampler's log-probs
    are there where the model server returned them. A rollout that `mask_sample` keeps out of the loss, its own or that
    of its `instance_config`, which NeMo-RL reads, is masked whole. Attempts that failed stand in ``*_failures.jsonl``,
    which is read only if it is named.
    """

    name = "nemo-gym"
    summary = "NeMo Gym's rollouts (output_jsonl_fpath)"
    logs_beside = False
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        **dict.fromkeys(TOKENS, "NeMo Gym writes it where the model server has return_token_id_information: true"),
        "*": "NeMo Gym saves rollouts and rewards of a collection: the trainer that uses them has the rest",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the keys of the first line."""
        for file in _files(path):
            if (lines.first_object(file) or {}).keys() >= _KEYS:
                return f"{'the file' if path.is_file() else file.name} has the keys {', '.join(sorted(_KEYS))}"
        return None

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Read all files, which are one step unless a field says which, and write the rows by step."""
        base.only_columns(self.name, options, ("step",))
        files = folders.named(sources, _files)
        total, done = sum(Path(file.path).stat().st_size for file in files), 0
        rollouts: dict[tuple[int, str], _Rollout] = {}
        facts: list[tuple[_Rollout, str]] = []
        for file in files:
            for line in lines.objects(file):
                if line.body is None:
                    sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                    facts += [(last, base.TORN_LINES) for last in list(rollouts.values())[-1:]]
                    continue
                parsed = _rollout(line.body, line.where, file, options.columns.get("step"))
                first = rollouts.setdefault((parsed.step, parsed.name), parsed)
                if first is not parsed and (parsed.response is None or parsed.response != first.response):
                    raise DataError(
                        f"{line.where}: rollout {parsed.name} (task, rollout) is there twice, with two responses; give "
                        "the files of one collection"
                    )
                facts += [(first, base.REPEATED_ROWS)] if first is not parsed else []
            done += Path(file.path).stat().st_size
            sink.advance(done, total)
        sink.begin(RunMetadata())
        _write(rollouts.values(), sink)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no rollout of NeMo Gym there")
        for rollout, fact in facts:
            sink.fact(rollout.step, rollout.split, fact, 1)


def _rollout(body: dict[str, object], where: str, file: Source, step_of: str | None) -> _Rollout:
    """Read a line.

    Raises:
        DataError: if a field does not fit.
    """
    if not body.keys() >= _KEYS:
        raise DataError(f"{where}: no {', '.join(sorted(_KEYS - body.keys()))}; not a rollout of NeMo Gym")
    response = {} if body["response"] is None else body["response"]
    if not isinstance(response, dict):
        raise DataError(f"{where}: response is {cells.shown(response)} where an object was expected")
    step = 0 if step_of is None else cells.natural({step_of: value_at(body, step_of)}, step_of, where)
    split = EVAL if step_of is None else TRAIN
    task, number = (cells.natural(body, name, where) for name in (_TASK, _ROLLOUT))
    attempt = 0 if body.get(_ATTEMPT) is None else cells.natural(body, _ATTEMPT, where)
    name = (cells.text(body.get(_ID)) or f"{task}-{number}") + (f"-a{attempt}" if attempt else "")
    trajectory = blake2b(f"{step}-{name}".encode(), digest_size=8).digest()
    row: dict[str, object] = {
        "step": step,
        "split": split,
        "group_id": str(task),
        "task_id": str(task),
        "trajectory_id": int.from_bytes(trajectory, "little") >> 1,
        "reward": cells.number(body["reward"], f"{where}: reward"),
        "status": _status(response),
        "error": _error(body, response),
    }
    is_masked = any(each.get("mask_sample") is True for each in (body, as_object(body.get("instance_config"))))
    nothing: list[dict[str, object]] = [{}]
    parts = pieces(response.get("output"), where, failures=failed_tools(body), is_masked=is_masked) or nothing
    rows = [
        row | {"sample_id": f"{step}-{name}" + f"/{place}" * (place > 0)} | {key: piece.get(key) for key in TOKENS}
        for place, piece in enumerate(parts)
    ]
    return _Rollout(file, step, split, name, response.get("id"), rows)


def _status(response: Mapping[str, object]) -> str | None:
    reason = as_object(response.get("incomplete_details")).get("reason")
    return "length" if reason == "max_output_tokens" else cells.text(reason or response.get("status"))


def _error(body: Mapping[str, object], response: Mapping[str, object]) -> str | None:
    """Return why a rollout failed: its class in the file of failures, else what the model server said."""
    if body.get("_ng_failure_class") is not None:
        return cells.text(body["_ng_failure_class"])
    fault = as_object(response.get("error"))
    words = [" ".join(str(fault[name]).split()) for name in ("code", "message") if fault.get(name)]
    return cells.text(": ".join(words)) or None


def _write(rollouts: Iterable[_Rollout], sink: base.RunSink) -> None:
    """Write the rows by step; a step in which a rollout has no token ids is written without tokens."""
    by_step = sorted(rollouts, key=lambda rollout: rollout.step)
    bare = [rollout for rollout in by_step if rollout.rows[0]["response_ids"] is None]
    broken = sum(len(rollout.rows) > 1 for rollout in by_step)
    has_tokens, without = len(bare) < len(by_step), {rollout.step for rollout in bare}
    for (step, file), group in groupby(by_step, key=lambda rollout: (rollout.step, rollout.file)):
        rows = [row for rollout in group for row in (rollout.rows[:1] if step in without else rollout.rows)]
        columns = {name: [row[name] for row in rows] for name in rows[0] if has_tokens or name not in TOKENS}
        if step in without:
            columns |= {name: [None] * len(rows) for name in columns.keys() & {*TOKENS}}
        sink.write_from(file, columns)
    if bare and has_tokens:
        sink.note(f"{len(bare)} of {len(by_step)} rollouts have no token ids: their steps are read without tokens")
    if broken:
        sink.note(
            f"{broken} of {len(by_step)} rollouts have a call whose prompt does not begin with the tokens before it, "
            "and have a row for each contiguous piece; NeMo-RL refuses them"
        )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return folders.listed(path, lambda entry: entry.suffix == ".jsonl" and not entry.name.endswith(_BESIDE))
