"""Responses without a step: a JSON list, or JSON Lines, with a text or token ids and a reward in each object."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolloutdoctor.data.schema import BY_NAME, TEXTS, Kind
from rolloutdoctor.importers import base
from rolloutdoctor.importers.mapped import fields_of
from rolloutdoctor.importers.mapped_lines import cell, value_at
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.locations.small_files import read_small_bytes
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError

_LARGEST = 256 * 2**20
_CHUNK_ROWS = 4096

_SPELLINGS = {
    "reward": ("rewards", "reward_score", "final_reward", "total_score"),
    "response": ("generated_text", "generation", "model_output", "output_text", "generated"),
    "response_ids": ("token_ids", "output_ids", "output_token_ids", "generated_ids", "completion_token_ids"),
    "prompt": ("question", "query", "problem", "instruction"),
}
"""Column to names that it has in lists that people write themselves, beside its own."""

_OF_A_RESPONSE = ("response", "response_ids", "response_mask", "rollout_log_probs", "policy_log_probs", "old_log_probs")
_STEP = 0

_OF_STEPS = re.compile(r"(?i)(?<![a-z])(step|iteration|update)")
"""What counts steps under another name: rows of several steps are not one batch."""


class ResponseList:
    """Responses of a loop of one's own, or of an evaluation, with a reward each.

    Where nothing says a step all are one batch; responses to one prompt are a group. A JSON list of rollouts that do
    have a step is read, too.
    """

    name = "responses"
    summary = "JSON lists and JSON Lines of responses with a reward, without a step"
    logs_beside = False
    checks_files = False
    omits_rows = True
    recording: Mapping[str, str] = {
        "*": "a list of responses does not hold it: write the rollouts with rolloutdoctor.recorders.own_loop, in the "
        "training step"
    }

    def detect(self, path: Path) -> str | None:
        """Look for an object with a reward, and a text or token ids; a line of JSON Lines has no step either."""
        if not path.is_file() or path.suffix not in (".json", ".jsonl") or ".metrics." in path.name:
            return None
        first = lines.first_object(path)
        is_lines = first is not None and not isinstance(_list_in(first), list)
        try:
            row = first if is_lines else next(iter(_of_document(Source.of(str(path)))), None)
        except InputError:
            return None
        where = _where(row) if isinstance(row, dict) else {}
        if "reward" not in where or where.keys().isdisjoint(_OF_A_RESPONSE) or (is_lines and "step" in where):
            return None
        if "step" not in where and isinstance(row, dict) and any(_OF_STEPS.search(name) for name in row):
            return None
        content = "rollouts" if "step" in where else "responses without a step"
        return f"{'JSON Lines' if is_lines else 'a JSON list'} of {content}, with {', '.join(sorted(where))}"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Write the rows of all files as one batch, or under their steps."""
        base.only_columns(self.name, options, ())
        files = sorted(sources, key=lambda source: natural_key(source.name))
        begun: dict[str, str] | None = None
        for done, file in enumerate(files, start=1):
            rows = list(_rows(file, sink))
            if begun is None:
                begun = _where(rows[0][0]) if rows else {}
                sink.begin(RunMetadata())
            _write(
                rows, {name: place for name, place in begun.items() if options.text or name not in TEXTS}, file, sink
            )
            sink.advance(done, len(files))
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no response is there")


def _write(
    rows: Sequence[tuple[dict[str, object], str]], where: Mapping[str, str], file: Source, sink: base.RunSink
) -> None:
    """Write the rows of a file, with the steps and groups that they have or are given."""
    extra: dict[str, list[object]] = {}
    if "step" not in where:
        extra["step"] = [_STEP] * len(rows)
        sink.note(f"{file.name}: nothing says a step: its {len(rows):,} responses are read as one batch")
    if "group_id" not in where:
        groups = _groups(rows)
        if groups is None:
            sink.note(
                f"{file.name}: no two responses have one prompt, and nothing says groups: what compares responses to "
                "one prompt is not tested; record a group_id"
            )
        else:
            extra["group_id"] = list(groups)
            sink.note(f"{file.name}: responses to equal prompts are read as one group")
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = rows[start : start + _CHUNK_ROWS]
        columns: dict[str, Sequence[object]] = {
            name: [cell(name, _value(name, value_at(body, place)), f"{at}: {place}") for body, at in part]
            for name, place in where.items()
        }
        columns |= {name: values[start : start + len(part)] for name, values in extra.items()}
        sink.write_from(file, columns)


def _groups(rows: Sequence[tuple[dict[str, object], str]]) -> list[int] | None:
    """Number the prompts of rows; None where they have none, or each has its own."""
    place = _where(rows[0][0]).get("prompt_ids") or _where(rows[0][0]).get("prompt") if rows else None
    if place is None:
        return None
    numbers: dict[str, int] = {}
    groups = [
        # A row without a prompt is its own.
        numbers.setdefault(f"row {number}" if prompt is None else json.dumps(prompt, sort_keys=True), len(numbers))
        for number, prompt in enumerate(value_at(body, place) for body, _ in rows)
    ]
    return groups if max(Counter(groups).values()) > 1 else None


def _where(row: Mapping[str, object]) -> dict[str, str]:
    """The columns of an object: by their names, else as people call them."""
    places = {name: place for name, place in fields_of(row).items() if BY_NAME[name].kind is not Kind.NAMED_NUMBERS}
    for name, spellings in _SPELLINGS.items():
        if name not in places:
            place = next((each for each in spellings if each in row and _fits(name, row[each])), None)
            places |= {} if place is None else {name: place}
    return places


def _fits(name: str, value: object) -> bool:
    if name == "reward":
        return isinstance(value, (int, float))
    return isinstance(value, list if BY_NAME[name].kind.per_token else str)


def _value(name: str, value: object) -> object:
    """A verdict as a reward of 0 or 1."""
    return float(value) if name == "reward" and isinstance(value, bool) else value


def _rows(file: Source, sink: base.RunSink) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the objects of a file, and where each is."""
    first = lines.first_object(Path(file.path))
    if first is None or isinstance(_list_in(first), list):
        for number, row in enumerate(_of_document(file), start=1):
            if not isinstance(row, dict):
                raise DataError(f"{file.name}, row {number}: not an object; write one object for each response")
            yield row, f"{file.name}, row {number}"
        return
    for line in lines.objects(file):
        if line.body is None:
            sink.note(f"{file.name}: the last line was not written to its end, and is left out")
        else:
            yield line.body, line.where


def _of_document(file: Source) -> list[object]:
    raw = read_small_bytes(file.path, name=file.name, expected="write JSON Lines", most=_LARGEST)
    body = lines.document(raw)
    rows = body if isinstance(body, list) else _list_in(body)
    return rows if isinstance(rows, list) else []


def _list_in(body: object) -> object:
    """The one list of objects in an object without a reward of its own, such as that under "results"."""
    if not isinstance(body, dict) or "reward" in _where(body):
        return None
    tables = [
        rows for rows in body.values() if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    ]
    return tables[0] if len(tables) == 1 else None
