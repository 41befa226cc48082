"""Rows of verl's JSON Lines: many at once where Arrow reads them as Python does, else one by one."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolloutdoctor.data.batch import TRAIN
from rolloutdoctor.importers import arrow_lines, base, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError

_COLUMNS = ("step", "group_id", "sample_id", "reward", "prompt", "response")
_PROMPT_OF_UID = r"(?s)^(.*?)(?:_[^_]*){1,2}$"

Groups = dict[tuple[int, bytes], int]


class VerlReader:
    """Streams the files of one dump into a sink.

    Args:
        sink: begun.
        score: name of the field that holds the reward.
        total: bytes of all files.
    """

    def __init__(self, sink: base.Sink, score: str, total: int) -> None:
        self.sink, self.score, self.total = sink, score, total
        self._done = 0
        self._torn: list[tuple[str, int | None]] = []
        self._empty = 0
        self._without_uid = False
        self._has_several = False
        self._first_step: int | None = None

    def add(self, file: Source) -> None:
        """Stream one file.

        Raises:
            DataError: if a line is no rollout; the message names it.
        """
        groups: Groups = {}
        last: int | None = None
        size = 0
        for chunk, table in arrow_lines.ahead(self._parsed, lines.chunks(file)):
            columns = None if table is None else _columns(table, chunk.first, self.score, groups)
            if table is None or columns is None:
                last = self._one_by_one(file, chunk, groups, last)
            else:
                last = columns["step"][-1].as_py()
                self._saw(pc.min(columns["step"]).as_py())
                self._without_uid |= "uid" not in table.column_names
                if "uid" in table.column_names:
                    self._has_several |= not pc.all(pc.ends_with(columns["sample_id"], "_0")).as_py()
                self.sink.write(columns)
            size = chunk.bytes_read
            self.sink.advance(self._done + size, self.total)
        self._empty += not size
        self._done += size
        self.sink.advance(self._done, self.total)

    def finish(self) -> None:
        """Say what was found out.

        Raises:
            InputError: if there was no whole line.
        """
        if not self.sink.rows or self._first_step is None:
            raise InputError("the dump holds no whole line; check that verl finished writing it")
        for name, last in self._torn:
            self.sink.fact(self._first_step if last is None else last, TRAIN, base.TORN_LINES, 1)
            self.sink.note(f"{name}: the last line was not written to its end, and is left out")
        if self._empty:
            self.sink.note(f"{self._empty} files are empty")
        if self._has_several:
            self.sink.note(
                "sessions with several outputs (a uid that does not end in _0): verl takes its baseline over the last "
                "output of each session alone, and here every output is a row of the group"
            )
        if self._without_uid:
            self.sink.note(
                "no uid in the rows: rows of a step with the same input are one group, so a prompt that was drawn "
                "twice in a step makes one group of two"
            )

    def _saw(self, step: int) -> None:
        self._first_step = step if self._first_step is None else min(step, self._first_step)

    def _parsed(self, chunk: lines.Chunk) -> pa.Table | None:
        has_uid = b'"uid"' in chunk.raw[: chunk.raw.find(b"\n")]
        fields = {"step": pa.int64(), self.score: pa.float64()}
        if len(fields) < 2 or fields.keys() & {"uid", "input", "output"}:
            return None
        if has_uid:
            fields["uid"] = pa.string()
        if self.sink.text or not has_uid:
            # Without a uid the prompt says what is a group.
            fields["input"] = pa.string()
        if self.sink.text:
            fields["output"] = pa.string()
        return arrow_lines.parsed(chunk.raw, pa.schema(fields), without=() if has_uid else ("uid",))

    def _one_by_one(self, file: Source, chunk: lines.Chunk, groups: Groups, last: int | None) -> int | None:
        """Write the rows of some lines, and return the step of the last."""
        rows: list[tuple[object, ...]] = []
        for line in lines.objects_of(chunk, file.name):
            where = f"{file.name}, line {line.number}"
            if line.body is None:
                self._torn.append((file.name, last))
                continue
            row = line.body
            last = step = lines.natural(row, "step", where)
            self._saw(step)
            self._without_uid |= "uid" not in row
            score = lines.number(row.get(self.score), f"{where}: {self.score}")
            sample = str(row["uid"]) if "uid" in row else f"{step}-{line.number - 1}"
            self._has_several |= "uid" in row and not sample.endswith("_0")
            texts = (row.get("input"), row.get("output")) if self.sink.text else ()
            rows.append((step, _group(row, step, groups), sample, score, *map(_text, texts)))
        if rows:
            self.sink.write(dict(zip(_COLUMNS, zip(*rows, strict=True), strict=False)))
        return last


def _columns(table: pa.Table, first: int, score: str, groups: Groups) -> dict[str, pa.Array] | None:
    """Make canonical columns of parsed lines, of which `first` is the number of the first; None if a row is odd."""
    step = table.column("step").combine_chunks()
    if step.null_count or pc.min(step).as_py() < 0:
        return None
    found = {"step": step}
    if "uid" in table.column_names:
        uid = table.column("uid").combine_chunks()
        if uid.null_count:
            return None
        found["group_id"] = pc.replace_substring_regex(uid, _PROMPT_OF_UID, r"\1")
        found["sample_id"] = uid
    else:
        prompt = table.column("input").combine_chunks()
        if prompt.null_count:
            return None
        found["group_id"] = _groups(step.to_numpy(), prompt.dictionary_encode(), groups)
        number = pa.array(np.arange(first - 1, first - 1 + len(step)))
        found["sample_id"] = pc.binary_join_element_wise(step.cast(pa.string()), number.cast(pa.string()), "-")
    found["reward"] = table.column(score).combine_chunks()
    for name, field in (("prompt", "input"), ("response", "output")):
        if "output" in table.column_names:
            found[name] = table.column(field).combine_chunks()
    return found


def _groups(step: np.ndarray, prompt: pa.DictionaryArray, groups: Groups) -> pa.Array:
    """Name the groups of rows: those of a step with an equal prompt."""
    digests = [_digest(text) for text in prompt.dictionary.to_pylist()]
    pairs = np.stack([step, prompt.indices.to_numpy().astype(np.int64)])
    unique, at, which = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    names = np.empty(len(at), dtype=object)
    # Numbered as they come.
    for place in np.argsort(at):
        here = int(unique[0, place])
        names[place] = f"{here}-{groups.setdefault((here, digests[unique[1, place]]), len(groups))}"
    return pa.array(names, pa.string()).take(pa.array(which.reshape(-1)))


def _group(row: dict[str, object], step: int, groups: Groups) -> str:
    uid = row.get("uid")
    if uid is not None:
        return str(uid).rsplit("_", 2)[0]
    return f"{step}-{groups.setdefault((step, _digest(row.get('input'))), len(groups))}"


def _digest(prompt: object) -> bytes:
    return hashlib.blake2b(str(prompt).encode("utf-8", "replace"), digest_size=16).digest()


def _text(value: object) -> str | None:
    # A lone surrogate is valid JSON and not valid UTF-8.
    return None if value is None else str(value).encode("utf-8", "replace").decode()
