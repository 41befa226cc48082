"""TensorBoard event files."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Entry, of_splits
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.tensorboard_records import hparams, records, scalars, texts
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

_ARGUMENTS = "args/text_summary"
_BEGINNING = 64
"""Records in which options are written."""

_OF_OPTIONS = re.compile(r"(?i)(^|[/_])(args|arguments|hyper|hparam|config|param)")
_OF_THE_MODEL = "model"
_ROW = re.compile(r"\s*\|\s*([A-Za-z_][\w.]{0,100})\s*\|\s*([^|]{1,200}?)\s*\|\s*")


class TensorboardEvents:
    """An event file.

    The transformers Trainer writes train/kl and eval/kl for what it logs as kl and eval_kl; its files begin with its
    arguments (``TensorBoardCallback``, transformers/integrations/integration_utils.py), and the prefix is taken off.
    """

    def detect(self, path: Path) -> str | None:
        """Tell by the name that `SummaryWriter` gives."""
        return "a TensorBoard event file" if ".tfevents." in path.name and path.is_file() else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the scalars one by one.

        Raises:
            InputError: if the file cannot be read.
        """
        offsets: list[int] = []
        tags: set[str] = set()
        try:
            with Path(source.path).open("rb") as stream:
                beginning = islice(records(stream, offsets.append), _BEGINNING)
                is_prefixed = any(tag == _ARGUMENTS for each in beginning for tag, _ in texts(each))
                stream.seek(0)
                offsets.clear()
                for record in records(stream, offsets.append):
                    for step, name, value in scalars(record, tags):
                        if step < 0:
                            raise InputError(f"{source.name}: step {step} of {name}; steps count from 0")
                        for split, values in of_splits({name: value}, "eval/" if is_prefixed else ""):
                            yield step, split, values
        except OSError as error:
            raise InputError(f"{source.name}: {reason(error)}") from None
        except ValueError as error:
            raise InputError(f"{source.name}: not a readable TensorBoard event file ({error}); copy it again") from None
        if offsets:
            notes.say(
                f"a record is not whole (byte {offsets[0]:,}): the run goes on, or the file is damaged; "
                "what is before it was read"
            )


def tensorboard_config(path: Path) -> dict[str, object]:
    """Return the options that an event file begins with: those of the plugin of hyperparameters, and of texts.

    A text is JSON, as the transformers Trainer writes its arguments, or a table of Markdown, a row an option.
    """
    options: dict[str, object] = {}
    try:
        with path.open("rb") as stream:
            for record in islice(records(stream, lambda offset: None), _BEGINNING):
                options |= dict(hparams(record))
                for tag, text in texts(record):
                    if _OF_OPTIONS.search(tag) and _OF_THE_MODEL not in tag:
                        options |= _of_text(text)
    except (OSError, ValueError):
        # Reading the scalars says it.
        return options
    return options


def _of_text(text: str) -> dict[str, object]:
    body = lines.document(text.encode("utf-8", "replace")) if "{" in text else None
    if isinstance(body, dict):
        return {str(name): value for name, value in body.items()}
    return {row[1]: row[2] for row in map(_ROW.fullmatch, text.splitlines()) if row is not None}
