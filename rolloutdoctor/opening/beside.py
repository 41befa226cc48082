"""Options that lie beside the numbers: found, and put under what the user states."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rolloutdoctor.engine.configure import can_be_configured, configure, read_trainer_config
from rolloutdoctor.importers.logs.console import Console
from rolloutdoctor.importers.logs.table import kind_of, located
from rolloutdoctor.importers.logs.tensorboard import tensorboard_config
from rolloutdoctor.importers.logs.trackio_project import trackio_config
from rolloutdoctor.importers.logs.wandb_run import wandb_config
from rolloutdoctor.importers.reading.notebooks import read_notebook
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import flat, read_small
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.opening.stated.calls import read_code
from rolloutdoctor.opening.stated.options import Stated, trainer_of
from rolloutdoctor.opening.stated.printed import read_printed
from rolloutdoctor.opening.stated.resolved_configs import read_resolved_configs
from rolloutdoctor.opening.stated.training_args import checkpoints, find_training_args, read_training_args
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS

Tell = Callable[[str], None]

_STATE, _COMPLETIONS = "trainer_state.json", "completions_"
_ADAPTER = "adapter_config.json"
_WRAPPED = re.compile(r"([^.]+)\.value(?:\.(.+))?")
_HYDRA = (".hydra/config.yaml", "outputs/*/.hydra/config.yaml", "outputs/*/*/.hydra/config.yaml")


def newest_state(folder: Path) -> Path | None:
    """The log of the newest checkpoint in an output folder of the transformers Trainer."""
    return next((place / _STATE for place in checkpoints(folder) if (place / _STATE).is_file()), None)


def stated_beside(
    paths: Sequence[str], logs: Sequence[Source], tell: Tell, likely: Sequence[str] = (), begins: int = 0
) -> list[Stated]:
    """Read the options that lie beside dumps and logs, the most certain first; what cannot be read is told.

    Args:
        paths: files and folders, as the user gave them.
        logs: the logs of numbers among them, or in them.
        tell: takes a sentence.
        likely: trainers that have names of the logs, the likeliest first.
        begins: lines of a console above the run that is read, which are of the runs before it.
    """
    given = [Path(path) for path in (*paths, *(log.path for log in logs))]
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in given)
    # A log by any other name need not be of the run that a folder is of.
    outputs = dict.fromkeys(path.parent for path in given if path.name == _STATE or path.name.startswith(_COMPLETIONS))
    outputs |= dict.fromkeys(path for path in given if path.is_dir())
    looks = [partial(_training_args, folder) for folder in outputs]
    looks += [partial(read_resolved_configs, folder) for folder in folders]
    looks += [partial(_printed, log, likely, begins) for log in logs]
    looks += [partial(_wandb, folder, likely) for folder in folders]
    looks += [partial(_tracked, log, likely) for log in logs]
    looks += [partial(_hydra, folder, likely) for folder in folders]
    found: dict[str, Stated] = {}
    for look in looks:
        if found and look.func is _hydra:
            # What a run printed, or keeps itself, is of this run for certain.
            continue
        try:
            one = look()
            if one is not None:
                found.setdefault(one.origin, one)
                if one.remark:
                    tell(one.remark)
        except (RolloutDoctorError, OSError) as error:
            tell(str(error))
    for folder in outputs:
        for place in (folder, *checkpoints(folder)[:1]):
            if (place / _ADAPTER).is_file():
                tell(f"{_ADAPTER} in {place.name}: the run trained an adapter")
    stated = list(found.values())
    if stated and not any(one.version for one in stated):
        places = [place for folder in folders for place in (folder, folder / "files")]
        release = _release_beside(places, TRAINERS[stated[0].trainer])
        stated[0] = replace(stated[0], version=release, version_origin="requirements.txt" if release else "")
    return stated


def _training_args(folder: Path) -> Stated | None:
    file = find_training_args(folder)
    return None if file is None else read_training_args(file)


def _printed(log: Source, likely: Sequence[str], begins: int) -> Stated | None:
    """What a run printed on its console, or stated in the code of its notebook."""
    path, number = located(Path(log.path))
    log = log if number is None else Source(str(path), log.name.rpartition("/")[0])
    notebook = read_notebook(path)
    if notebook is not None:
        return read_code(notebook, f"code of {Path(log.name).name}", likely)
    console = path / "files" / "output.log" if path.is_dir() else path
    printed = Source(str(console), log.name)
    found = read_printed(printed, likely, begins) if Console().detect(console) is not None else None
    # wandb notes what `wandb.init` was given.
    noted = path / "logs" / "debug.log"
    return (
        read_printed(Source(str(noted), f"{log.name}/logs/debug.log"), likely)
        if found is None and noted.is_file()
        else found
    )


def _release_beside(folders: Iterable[Path], trainer: Trainer) -> str | None:
    """The release that the list of packages in a folder of the run pins."""
    pin = re.compile(rf"^{re.escape(trainer.package_name)}\s*==\s*([^\s;#]{{1,60}})", re.MULTILINE | re.IGNORECASE)
    for packages in (folder / "requirements.txt" for folder in folders):
        if packages.is_file():
            release = pin.search(read_small(packages, expected="", error=InputError))
            if release is not None:
                return release[1]
    return None


def _wandb(folder: Path, likely: Sequence[str]) -> Stated | None:
    """``{name: {value: ...}}`` in ``files/config.yaml``, and the release in the list of packages beside it."""
    file = _config_of_wandb(folder)
    if not file.is_file():
        return None
    values = _unwrapped(file)
    trainer = trainer_of(values, likely)
    if trainer is None:
        return None
    release = _release_beside([folder / "files"], TRAINERS[trainer])
    return Stated("config.yaml of wandb", trainer, values, release, "requirements.txt of wandb")


def tracked(log: Source) -> dict[str, object]:
    """Return what a tracker was given at the start of the run; a wandb run that goes on has no config.yaml."""
    kind, path = kind_of(Path(log.path)) or "", Path(log.path)
    if (file := _config_of_wandb(path)).is_file():
        return _unwrapped(file)
    if kind == "the folder of a wandb run":
        config = wandb_config(log)
    elif "TensorBoard" in kind:
        config = tensorboard_config(path)
    else:
        config = trackio_config(log) if "trackio" in kind else {}
    table: dict[object, object] = {}
    table.update(config.items())
    return flat(table, log.name)


def _config_of_wandb(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "files" / "config.yaml"


def _unwrapped(file: Path) -> dict[str, object]:
    """The options of ``{name: {value: ...}}``, as wandb writes them; without its own."""
    named = [(_WRAPPED.fullmatch(name), value) for name, value in read_trainer_config(str(file)).values.items()]
    values = {".".join(filter(None, name.groups())): value for name, value in named if name is not None}
    return {name: value for name, value in values.items() if not name.startswith("_wandb")}


def _tracked(log: Source, likely: Sequence[str]) -> Stated | None:
    if _config_of_wandb(Path(log.path)).is_file():
        return None
    kind, values = kind_of(Path(log.path)) or "", tracked(log)
    trainer = trainer_of(values, likely)
    return None if trainer is None else Stated(f"config of {kind.removeprefix('the folder of ')}", trainer, values)


def _hydra(folder: Path, likely: Sequence[str]) -> Stated | None:
    """The configuration of the only run that hydra left here."""
    files = [file for pattern in _HYDRA for file in folder.glob(pattern)]
    if len(files) != 1:
        return None
    # An interpolation stands for the value of another option.
    layer = read_trainer_config(str(files[0])).values
    values = {name: value for name, value in layer.items() if "${" not in str(value)}
    trainer = trainer_of(values, likely)
    return None if trainer is None else Stated(str(files[0].relative_to(folder)), trainer, values)


def completed(
    metadata: RunMetadata, stated: Sequence[Stated], tell: Tell, writer: Trainer | None = None
) -> RunMetadata:
    """Return the metadata of a dump or a log with the options that lie beside it, each with its origin.

    Args:
        metadata: what is known without them; it yields to them, as it was found out from the numbers.
        stated: the most certain first.
        tell: takes what is not used, and why.
        writer: the trainer whose names the log has, if that is certain.
    """
    known = TRAINERS.get(metadata.trainer or "") or writer
    ours = []
    for one in stated:
        if known is not None and not _logs_as(TRAINERS[one.trainer], known):
            tell(f"{one.origin}: options of {TRAINERS[one.trainer].title} beside numbers of {known.title}: not used")
            continue
        ours.append(one)
        known = TRAINERS[one.trainer]
    if not ours:
        return metadata
    trainer = ours[0].trainer
    config, origins = _merged(ours, tell)
    length = _total_steps(ours, TRAINERS[trainer])
    release = next((one for one in ours if one.version), None)
    if release is not None:
        origins["trainer_version"] = release.version_origin
    found = replace(
        metadata,
        trainer=trainer,
        trainer_version=release.version if release else metadata.trainer_version,
        config={**metadata.config, **config},
        origins={**metadata.origins, **origins},
    )
    version = found.trainer_version or None
    is_older = version is not None and TRAINERS[trainer].release(version).state == "older"
    try:
        # The options of an older release are read by their names; its arithmetic confirms nothing.
        configure(found, None, (), lenient=is_older)
    except UsageError as error:
        # A value that is not understood takes out what it decides, and no other option.
        if can_be_configured(found):
            tell(f"{error}; the value is not used")
            return found.with_total_steps(length)
        # Without them the default of this option would be taken for its value.
        tell(f"{error}; the options are not used")
        return replace(metadata, trainer=None).with_total_steps(length)
    places = dict.fromkeys(origins.values())
    tell(f"options of {trainer} from {', '.join(places)}")
    return found.with_total_steps(length)


def _merged(stated: Sequence[Stated], tell: Tell) -> tuple[dict[str, object], dict[str, str]]:
    """Merge options of one trainer, the most certain first, and return their values and their origins."""
    options = {option.name: option for option in TRAINERS[stated[0].trainer].options}
    config: dict[str, object] = {}
    origins: dict[str, str] = {}
    for one in stated:
        for name, value in one.values.items():
            if name not in options:
                continue
            if is_empty(value) and not options[name].optional:
                tell(f"{name} is empty in {one.origin}: it is not used")
                continue
            if str(config.setdefault(name, value)) != str(value):
                tell(f"{name} is {config[name]} in {origins[name]} and {value} in {one.origin}: the first is used")
            origins.setdefault(name, one.origin)
    return config, origins


def _logs_as(stated: Trainer, known: Trainer) -> bool:
    """Tell whether a trainer can have written a log with the names of another: its own, or that it is a patch of."""
    return known.title in (stated.title, TRAINERS.get(stated.package_name, stated).title)


def is_empty(value: object) -> bool:
    """Tell a value that a table of options leaves open."""
    return value is None or (isinstance(value, str) and not value.strip())


def _total_steps(stated: Sequence[Stated], trainer: Trainer) -> int | None:
    """Return the optimizer steps that the run was planned for; -1 and the like leave that to the epochs."""
    values = (str(one.values.get(name)) for one in stated for name in trainer.roles.total_steps)
    return next((int(text) for text in values if text.isdecimal() and 0 < int(text) < 2**53), None)
