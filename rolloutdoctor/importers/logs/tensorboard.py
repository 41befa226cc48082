"""TensorBoard event files, read with the tensorboard package (the extra `tensorboard`)."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry, LogNotes
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
            InputError: if the tensorboard package is missing, or the file cannot be read.
        """
        is_prefixed = any(
            value.tag == _ARGUMENTS for event in islice(_events(source), _BEGINNING) for value in event.summary.value
        )
        for event in _events(source):
            for value in event.summary.value:
                number = _scalar(value, source)
                if number is None:
                    continue
                name, split = value.tag, TRAIN
                if is_prefixed:
                    split = EVAL if name.startswith("eval/") else TRAIN
                    name = name.removeprefix("eval/").removeprefix("train/")
                if event.step < 0:
                    raise InputError(f"{source.name}: step {event.step} of {name}; steps count from 0")
                yield event.step, split, {name: number}


def _events(source: Source) -> "Iterator[Any]":
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        raise InputError(
            f"{source.name}: TensorBoard event files need the tensorboard package; "
            "pip install 'rolloutdoctor[tensorboard]'"
        ) from None
    try:
        with Path(source.path).open("rb") as file:
            file.read(1)
        yield from EventFileLoader(source.path).Load()
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except Exception as error:  # tensorboard's reader raises anything on damaged records, protobuf's own errors too
        raise _unreadable(source, error) from None


def _unreadable(source: Source, error: Exception) -> InputError:
    kind = type(error).__name__
    return InputError(f"{source.name}: not a readable TensorBoard event file ({kind}); copy it again")


def _scalar(value: Any, source: Source) -> float | None:  # noqa: ANN401 - a protobuf message, made at run time
    from tensorboard.util import tensor_util

    if value.metadata.plugin_data.plugin_name != "scalars" or not value.HasField("tensor"):
        return None
    tensor = value.tensor
    if any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    try:
        return float(tensor_util.make_ndarray(tensor).reshape(()))
    except Exception as error:  # numpy's and tensorboard's own, of a type or a size that does not fit
        raise _unreadable(source, error) from None
