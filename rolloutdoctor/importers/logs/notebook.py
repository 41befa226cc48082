"""The outputs of a Jupyter notebook: text and tables; what its Markdown and code hold is no log."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from pathlib import Path

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.block_forms import WANDB_SUMMARY
from rolloutdoctor.importers.logs.console import Text, entries_of_text, text_of
from rolloutdoctor.importers.logs.forms import ANY_NAMES, FORMS
from rolloutdoctor.importers.logs.notes import LogNotes, read_once
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.printed import Form, Printed
from rolloutdoctor.importers.logs.repeated_lines import BLOCKS
from rolloutdoctor.importers.logs.text_table import TextTable
from rolloutdoctor.importers.reading.notebooks import is_notebook, read_notebook
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.metric_names.training_kind import NOT_CHECKED, OF_ANY_UPDATE, training_kind
from rolloutdoctor.results.errors import InputError


class NotebookOutputs:
    """A notebook with numbers in its outputs: the table that the transformers Trainer shows, or what is printed."""

    def detect(self, path: Path) -> str | None:
        """Tell any notebook, so that one without outputs is read as nothing else."""
        return "the outputs of a notebook" if path.is_file() and is_notebook(path) else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the numbers of one run, in the form that has most of them.

        Raises:
            InputError: if there are none.
        """
        text, added, ends = read_once(_read, source, notes)
        yield from entries_of_text(text, notes)
        is_last = bool(text.runs) and notes.begins is not None and notes.begins[1] == text.places[text.runs[-1].first]
        if added is not None and added.values and text.form is _TABLE and is_last:
            notes.say(
                f"the table has no {', '.join(sorted(metric_quantities(added.values)))}: "
                "read of the last step, from the summary that wandb shows"
            )
            yield added.step or 0, TRAIN, added.values
        before, first = notes.begins or (0, 0)
        notes.begins = bisect_left(ends, before) + 1 if before else 0, bisect_left(ends, first) + 1


def _read(source: Source, notes: LogNotes) -> tuple[Text, Printed | None, list[int]]:
    """Return the text of the outputs, what a summary adds to its last step, and the lines at which outputs end."""
    notebook = read_notebook(Path(source.path))
    if notebook is None:
        raise InputError(f"{source.name}: not a whole notebook; save it again")
    lines = list(chain.from_iterable(notebook.outputs))
    if not lines:
        raise InputError(f"{source.name}: a notebook without outputs, which were cleared; give one that was run")
    # A table of losses alone says less than dicts with rewards below it.
    records = {form: list(form.records(lines)) for form in FORMS}
    added: Printed | None = None
    if (last := _last_of_table(lines, records[_TABLE], records[WANDB_SUMMARY])) is not None:
        added, records[WANDB_SUMMARY] = last, []
    counts: dict[Form, int] = {form: sum(len(record.values) for record in printed) for form, printed in records.items()}
    # Lines of any names may be of every response: they count where nothing else has numbers of rewards.
    trained = {form for form in FORMS if form not in ANY_NAMES or _is_of_steps(records[form])}
    best = max(
        FORMS,
        key=lambda form: (
            form in trained and _has_reward(records[form], is_any=form in ANY_NAMES),
            bool(metric_quantities(_names(records[form]))),
            # A summary is of one step.
            form is not WANDB_SUMMARY,
            counts[form] > 0 and form not in ANY_NAMES,
            counts[form],
        ),
    )
    if _has_policy(records[BLOCKS]) and training_kind(_names(records[best])) in NOT_CHECKED:
        # The table is of a supervised training before that of the blocks.
        best = BLOCKS
    if not counts[best]:
        raise InputError(f"{source.name}: no output of the notebook has numbers of a training; give another log")
    text = _with_table(text_of(lines, best, notes), notebook.outputs)
    return text, added, list(accumulate(map(len, notebook.outputs)))


def _with_table(text: Text, outputs: Sequence[Sequence[str]]) -> Text:
    """Return the only run of lines with what the table in the same output adds: its losses, or the steps of its rows.

    Where the table has a step that no line has, or another loss, the lines may be of something else.
    """
    for lines in outputs if len(text.runs) == 1 else ():
        rows = {row.step: row.values for row in _TABLE.records(lines) if row.split == TRAIN}
        if not rows:
            continue
        if text.form in ANY_NAMES and rows.keys() <= {record.step for record in text.form.records(lines)}:
            joined = [replace(one, values={**rows.get(one.step, {}), **one.values}) for one in text.records]
            return replace(text, records=joined)
        lost = [one for one in text.records if one.step is None and one.split == TRAIN and "loss" in one.values]
        losses = [values.get("loss") for values in rows.values()]
        if len(losses) > 1 and [_as_shown(one.values["loss"]) for one in lost] == [*map(_as_shown, losses)]:
            steps = {id(one): step for one, step in zip(lost, rows, strict=True)}
            return replace(text, records=[replace(one, step=steps.get(id(one), one.step)) for one in text.records])
    return text


def _as_shown(loss: float | None) -> str:
    """Return a loss with the digits of the table, which has no sign of a zero."""
    return "" if loss is None else f"{loss + 0.0:.6f}".replace("-0.000000", "0.000000")


_TABLE = next(form for form in FORMS if isinstance(form, TextTable))


def _last_of_table(lines: Sequence[str], table: Sequence[Printed], summaries: Sequence[Printed]) -> Printed | None:
    """Return what a summary adds to the last step of a table; None where the table does not take its place.

    A longer table below it is of a later run, to which it adds nothing.
    """
    steps = [row.step or 0 for row in table if row.split == TRAIN]
    if not summaries or len(steps) < _FEWEST_ROWS:
        return None
    end, summary = steps[-1], summaries[-1]
    place = max(at for at, line in enumerate(lines) if _SUMMARY in line)
    below = [row for row in _TABLE.records(lines[place:]) if row.split == TRAIN]
    if below:
        return Printed({}, end) if len(below) >= _FEWEST_ROWS and end > (summary.step or 0) else None
    if not end <= (summary.step or 0) < end + max(end - steps[-2], 1):
        return None
    names = {name for row in table for name in row.values}
    # A 0 of one step alone, as of the reward or the gradient norm, says nothing of the others.
    return Printed({name: value for name, value in summary.values.items() if value and name not in names}, end)


_SUMMARY = "Run summary:"
_FEWEST_ROWS = 2
"""Rows of a table that says more than a summary of one step."""


def _is_of_steps(records: Sequence[Printed]) -> bool:
    """Tell lines of steps, each above the one before or a new beginning, or of none at all, from those of responses."""
    steps = [record.step for record in records if record.step is not None]
    if len(steps) < len(records):
        return not steps
    begins = [0, *(at for at, (before, after) in enumerate(pairwise(steps), start=1) if before >= after), len(steps)]
    lengths = [after - before for before, after in pairwise(begins)]
    if len(lengths) > 1 and lengths[0] == 1:
        # What is printed above the line of each step begins below the head of all.
        del lengths[0], begins[1]
    return len(lengths) == 1 or (min(lengths) >= _FEWEST and len({steps[at] for at in begins[:-1]}) == 1)


_FEWEST = 10
"""Steps of a run after which another one may begin: steps of responses fall back more often."""


def _has_reward(records: Sequence[Printed], *, is_any: bool) -> bool:
    """Tell a log with rewards; lines of any names have them in every second one, not in a stray one."""
    names = {name for name, quantity in metric_quantities(_names(records)).items() if quantity == "reward"}
    rewarded = sum(not names.isdisjoint(record.values) for record in records)
    return bool(rewarded) and (not is_any or 2 * rewarded >= len(records))


def _has_policy(records: Sequence[Printed]) -> bool:
    """Tell numbers of a policy from what evaluations and messages print, as ``saved plot at step 50``."""
    return bool({*metric_quantities(_names(records)).values()} - _OF_ANY_TRAINING)


_OF_ANY_TRAINING = OF_ANY_UPDATE | {"accuracy"}
"""Quantities that a supervised training has, too."""


def _names(records: Sequence[Printed]) -> set[str]:
    return {name for record in records for name in record.values}
