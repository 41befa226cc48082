"""TensorBoard event files."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.reading.tensorboard_records import is_text, records, scalars
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

_ARGUMENTS = "args/text_summary"
_BEGINNING = 64


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
        known: set[str] = set()
        try:
            with Path(source.path).open("rb") as stream:
                is_prefixed = any(
                    is_text(each, _ARGUMENTS) for each in islice(records(stream, offsets.append), _BEGINNING)
                )
                stream.seek(0)
                offsets.clear()
                for record in records(stream, offsets.append):
                    for step, name, value in scalars(record, known):
                        split = TRAIN
                        if is_prefixed:
                            split = EVAL if name.startswith("eval/") else TRAIN
                            name = name.removeprefix("eval/").removeprefix("train/")
                        if step < 0:
                            raise InputError(f"{source.name}: step {step} of {name}; steps count from 0")
                        yield step, split, {name: value}
        except OSError as error:
            raise InputError(f"{source.name}: {reason(error)}") from None
        except ValueError as error:
            raise InputError(f"{source.name}: not a readable TensorBoard event file ({error}); copy it again") from None
        if offsets:
            notes.tell(
                f"{source.name}: a record is not whole (byte {offsets[0]:,}): the run goes on, or the file is damaged; "
                "what is before it was read"
            )
