"""`training_args.bin` of the transformers Trainer: the fields of its pickled configuration, with nothing executed."""

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from rolloutdoctor.importers.reading.pickles import Inert, check_pickle, load_inert
from rolloutdoctor.io.archives import unarchived
from rolloutdoctor.io.locations.paths import natural_key
from rolloutdoctor.io.locations.small_files import read_small, read_small_bytes
from rolloutdoctor.opening.stated.calls import OF_TRL, trainer_of_class
from rolloutdoctor.opening.stated.options import Stated, is_other
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.dialects.table import dialect_of_class

NAME = "training_args.bin"

_MOST_BYTES = 2**20
"""Of a file: a hundred times what the Trainer writes."""

_LONGEST = 200
"""Characters or elements of a value."""

_RELEASE = re.compile(r"^- TRL: (\S+)$", re.MULTILINE)

_OF_THE_MODEL = ("router_aux_loss_coef",)
"""Fields that mean nothing for most models, and the file does not say for which model they are."""


def find_training_args(folder: Path) -> Path | None:
    """The file that belongs to an output folder, its completions folder, or a checkpoint."""
    if folder.name == "completions":
        folder = folder.parent
    places = [*checkpoints(folder), folder]
    return next((place / NAME for place in places if (place / NAME).is_file()), None)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in an output folder, the newest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: natural_key(path.name), reverse=True)


def read_training_args(path: Path) -> Stated:
    """Read the options, and the release that the model card in the output folder names.

    ``Trainer._save`` (transformers/trainer.py) writes the file with `torch.save`, ``create_model_card``
    (trl/trainer/base_trainer.py) the card.

    Raises:
        InputError: if it is no such file, or of a trainer that is not known here.
    """
    checkpoint = path.parent.name.startswith("checkpoint-")
    origin = f"{path.parent.name}/{NAME}" if checkpoint else NAME
    instance = _object(_pickle(path, origin), origin)
    kind = instance.name.rpartition(" ")[2]
    trainer = trainer_of_class(kind)
    if trainer is None or (is_other(instance.name) and trainer_of_class(instance.name) == OF_TRL):
        raise InputError(
            f"{origin}: the options of {kind[:80]!r}, and what its trainer computes is not known here; "
            "if it computes what TRL does, give them with --trainer trl --set KEY=VALUE"
        )
    values = dict(_plain_fields(instance.state))
    dialect = dialect_of_class(instance.name)
    if dialect is not None:
        dialect.refuse(values, origin)
    cards = [place / "README.md" for place in (path.parent, path.parent.parent)[: 1 + checkpoint]]
    card = next((card for card in cards if card.is_file()), None)
    release = None if card is None else _release(card)
    return Stated(origin, trainer, values, release, "README.md" if release else "")


def _release(card: Path) -> str | None:
    try:
        match = _RELEASE.search(read_small(card, expected="", most=_MOST_BYTES, error=InputError))
    except InputError:
        return None
    return None if match is None else match[1][:_LONGEST]


def _pickle(path: Path, origin: str) -> bytes:
    """The pickle in an archive of `torch.save`, which stores it as it is."""
    content = read_small_bytes(
        path, name=origin, expected="its options are not read", most=_MOST_BYTES, error=InputError
    )
    try:
        members = unarchived(content)
    except ValueError:
        members = {}
    pickled = next((member for name, member in members.items() if name.endswith("/data.pkl")), None)
    if pickled is None:
        raise InputError(f"{origin}: not a whole archive of torch.save; its options are not read")
    return pickled


def _object(content: bytes, origin: str) -> Inert:
    """Return the configuration.

    Raises:
        InputError: if it is damaged, or holds something else.
    """
    try:
        check_pickle(content)
        options = load_inert(BytesIO(content), {})
    except ValueError as error:
        raise InputError(f"{origin}: not the pickled options of a trainer ({error}); they are not read") from None
    if not isinstance(options, Inert):
        raise InputError(f"{origin}: not the pickled options of a trainer; they are not read")
    return options


def _plain_fields(state: dict[object, object]) -> Iterator[tuple[str, object]]:
    for name, value in state.items():
        # An enumeration is called with its value.
        if isinstance(value, Inert) and len(value.arguments) == 1:
            value = value.arguments[0]
        parts = value if isinstance(value, list) else [value]
        if len(parts) <= _LONGEST and all(map(_is_plain, parts)) and name not in _OF_THE_MODEL:
            yield str(name), value


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, float, type(None))) or (
        (isinstance(value, str) and len(value) <= _LONGEST) or (isinstance(value, int) and abs(value) < 2**63)
    )
