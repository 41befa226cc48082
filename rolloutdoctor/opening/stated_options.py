"""Options that lie beside the numbers: found, and put under what the user states."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rolloutdoctor.engine.configure import can_be_configured, configure, is_configured, read_trainer_config
from rolloutdoctor.importers.logs.console import Console
from rolloutdoctor.importers.logs.table import kind_of, located
from rolloutdoctor.importers.logs.tensorboard import tensorboard_config
from rolloutdoctor.importers.logs.trackio_project import trackio_config
from rolloutdoctor.importers.logs.wandb_run import wandb_config
from rolloutdoctor.importers.reading.notebooks import is_notebook, read_notebook
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import flat, read_small
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.opening.stated.calls import read_code
from rolloutdoctor.opening.stated.files_beside import read_files_beside
from rolloutdoctor.opening.stated.options import ReadLog, Stated, stated_of
from rolloutdoctor.opening.stated.own_loops import own_options
from rolloutdoctor.opening.stated.printed import BANNER_NAMES, read_output, read_printed
from rolloutdoctor.opening.stated.resolved_configs import read_resolved_configs
from rolloutdoctor.opening.stated.settings import read, settings_of
from rolloutdoctor.opening.stated.training_args import checkpoints, find_training_args, read_training_args
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS

Tell = Callable[[str], None]

_STATE, _COMPLETIONS = "trainer_state.json", "completions_"
_ADAPTER = "adapter_config.json"
_SUMMARY_OF_WANDB = "wandb-summary.json"
_WRAPPED = re.compile(r"([^.]+)\.value(?:\.(.+))?")
_ANY = ReadLog()
_MOST_OF_FEW = 8
"""Settings that a run says of itself where the files beside it say more: those of the banner of its trainer."""

_HYDRA = (".hydra/config.yaml", "outputs/*/.hydra/config.yaml", "outputs/*/*/.hydra/config.yaml")


def newest_state(folder: Path) -> Path | None:
    """The log of the newest checkpoint in an output folder of the transformers Trainer."""
    return next((place / _STATE for place in checkpoints(folder) if (place / _STATE).is_file()), None)


def stated_beside(paths: Sequence[str], logs: Sequence[Source], tell: Tell, log: ReadLog = _ANY) -> list[Stated]:
    """Read the options that lie beside dumps and logs, the most certain first; what cannot be read is told.

    Args:
        paths: files and folders, as the user gave them.
        logs: the logs of numbers among them, or in them.
        tell: takes a sentence.
        log: what the numbers say.
    """
    named_paths = [Path(path) for path in (*paths, *(log.path for log in logs))]
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in named_paths)
    # A log by any other name need not be of the run that a folder is of.
    outputs = dict.fromkeys(
        path.parent for path in named_paths if path.name == _STATE or path.name.startswith(_COMPLETIONS)
    )
    outputs |= dict.fromkeys(path for path in named_paths if path.is_dir())
    looks: list[partial[list[Stated]]] = [partial(_training_args, folder) for folder in outputs]
    looks += [partial(_resolved, folder) for folder in folders]
    looks += [partial(_printed, each, log) for each in logs]
    looks += [partial(_wandb, folder, log.likely) for folder in folders]
    looks += [partial(_tracked, each, log.likely) for each in logs]
    looks += [partial(_hydra, folder, log.likely) for folder in folders]
    looks += [partial(_own, each, log) for each in logs]
    looks += [partial(_files, each, log) for each in logs]
    by_origin: dict[tuple[str, str | None], Stated] = {}
    for look in looks:
        most = _MOST_OF_FEW if look.func is _files else 0
        if look.func in (_hydra, _own, _files) and any(
            config.trainer or len(config.values) > most for config in by_origin.values()
        ):
            # What a run printed, or keeps itself, is of this run for certain.
            continue
        try:
            for config in look():
                by_origin.setdefault((config.origin, config.trainer), config)
                if config.remark:
                    tell(config.remark)
        except (RolloutDoctorError, OSError) as error:
            tell(str(error))
    for folder in outputs:
        for place in (folder, *checkpoints(folder)[:1]):
            if (place / _ADAPTER).is_file():
                tell(f"{_ADAPTER} in {place.name}: the run trained an adapter")
    # A trainer that is known goes first.
    stated = sorted(by_origin.values(), key=lambda config: config.trainer is None)
    if stated and stated[0].trainer is not None and not any(config.version for config in stated):
        places = [place for folder in folders for place in (folder, folder / "files")]
        release = _release_beside(places, TRAINERS[stated[0].trainer])
        stated[0] = replace(stated[0], version=release, version_origin="requirements.txt" if release else "")
    return stated


def _training_args(folder: Path) -> list[Stated]:
    file = find_training_args(folder)
    return [] if file is None else [read_training_args(file)]


def _resolved(folder: Path) -> list[Stated]:
    config = read_resolved_configs(folder)
    return [] if config is None else [config]


def _own(source: Source, log: ReadLog) -> list[Stated]:
    config = own_options(source, log)
    return [] if config is None else [config]


def _files(source: Source, log: ReadLog) -> list[Stated]:
    path, _ = located(Path(source.path))
    return [] if path.is_dir() or is_notebook(path) else read_files_beside(path.parent, path, log)


def _printed(source: Source, log: ReadLog) -> list[Stated]:
    """What a run printed on its console, or stated in the code of its notebook."""
    path, _ = located(Path(source.path))
    notebook = read_notebook(path)
    if notebook is not None:
        code = read_code(notebook, f"code of {path.name}", log) or _own(source, log)
        output = read_output(notebook.outputs, source, log)
        return [*(_as_run(config, output) for config in code), *output]
    console = path / "files" / "output.log" if path.is_dir() else path
    printed = Source(str(console), source.name)
    configs = read_printed(printed, log) if Console().detect(console) is not None else []
    # wandb notes what `wandb.init` was given.
    noted = path / "logs" / "debug.log"
    if configs or not noted.is_file():
        return configs
    return read_printed(Source(str(noted), f"{source.name}/logs/debug.log"), replace(log, begins=None))


def _as_run(code: Stated, output: Sequence[Stated]) -> Stated:
    """Return what code states with the numbers that its run printed instead: Unsloth raises a batch to a group."""
    printed = {name: read(each.values[name]) for each in output for name in BANNER_NAMES & each.values.keys()}
    changed = {name: new for name, new in printed.items() if read(code.values.get(name, new)) != new}
    if not changed:
        return code
    words = (f"{name} is {code.values[name]} there, and {new} as the run printed" for name, new in changed.items())
    remark = "; ".join(filter(None, (code.remark, f"{code.origin}: {'; '.join(words)}: the latter is used")))
    return replace(code, values={**code.values, **changed}, remark=remark)


def _release_beside(folders: Iterable[Path], trainer: Trainer) -> str | None:
    """The release that the list of packages in a folder of the run pins."""
    pin = re.compile(rf"^{re.escape(trainer.package_name)}\s*==\s*([^\s;#]{{1,60}})", re.MULTILINE | re.IGNORECASE)
    for packages in (folder / "requirements.txt" for folder in folders):
        if packages.is_file():
            release = pin.search(read_small(packages, expected="", error=InputError))
            if release is not None:
                return release[1]
    return None


def options_said(path: Path) -> str:
    """Say how many options a text or a notebook without numbers states; empty if it states none."""
    notebook = read_notebook(path)
    try:
        configs = read_code(notebook, f"code of {path.name}") if notebook else read_printed(Source.of(str(path)))
    except RolloutDoctorError:
        return ""
    options = {
        option.name for config in configs if config.trainer is not None for option in TRAINERS[config.trainer].options
    }
    count = len(settings_of(configs, (), options, lambda sentence: None))
    return f"{count} options were read from {configs[0].origin}" if count > 1 else ""


def _wandb(folder: Path, likely: Sequence[str]) -> list[Stated]:
    """``{name: {value: ...}}`` in ``files/config.yaml``, and the release in the list of packages beside it."""
    file = _config_of_wandb(folder)
    config = stated_of("config.yaml of wandb", _unwrapped(file), likely) if file.is_file() else None
    if config is None or config.trainer is None:
        return [] if config is None else [config]
    release = _release_beside([folder / "files"], TRAINERS[config.trainer])
    return [replace(config, version=release, version_origin="requirements.txt of wandb")]


def _tracked_values(log: Source) -> dict[str, object]:
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
    folder = path if path.is_dir() else path.parent
    # The files of a run are given without their folder, too.
    return folder / ("config.yaml" if (folder / _SUMMARY_OF_WANDB).is_file() else "files/config.yaml")


def _unwrapped(file: Path) -> dict[str, object]:
    """The options of ``{name: {value: ...}}``, as wandb writes them; without its own."""
    named = [(_WRAPPED.fullmatch(name), value) for name, value in read_trainer_config(str(file)).values.items()]
    values = {".".join(filter(None, name.groups())): value for name, value in named if name is not None}
    # The Trainer of transformers adds the configuration of the model, with what models of before had for generation.
    others = _OF_MODELS if "architectures" in values else frozenset()
    return {name: value for name, value in values.items() if not name.startswith("_wandb") and name not in others}


_OF_MODELS = frozenset({"max_length", "num_return_sequences", "repetition_penalty", "torch_dtype"})


def _tracked(log: Source, likely: Sequence[str]) -> list[Stated]:
    if _config_of_wandb(Path(log.path)).is_file():
        return []
    kind = (kind_of(Path(log.path)) or "").removeprefix("the folder of ")
    config = stated_of(f"config of {kind}", _tracked_values(log), likely)
    return [] if config is None else [config]


def _hydra(folder: Path, likely: Sequence[str]) -> list[Stated]:
    """The configuration of the only run that hydra left here."""
    files = [file for pattern in _HYDRA for file in folder.glob(pattern)]
    if len(files) != 1:
        return []
    # An interpolation stands for the value of another option.
    layer = read_trainer_config(str(files[0])).values
    values = {name: value for name, value in layer.items() if "${" not in str(value)}
    config = stated_of(str(files[0].relative_to(folder)), values, likely)
    return [] if config is None else [config]


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
    owner = TRAINERS.get(metadata.trainer or "") or writer
    ours, settings = [], []
    for entry in stated:
        if entry.trainer is None:
            settings.append(entry)
        elif owner is not None and not _logs_as(TRAINERS[entry.trainer], owner):
            tell(
                f"{entry.origin}: options of {TRAINERS[entry.trainer].title} beside numbers of {owner.title}: not used"
            )
        else:
            ours.append(entry)
            owner = TRAINERS[entry.trainer]
    updated = _with_options(metadata, ours, tell) if ours else metadata
    names = {option.name for config in ours[:1] for option in TRAINERS[str(config.trainer)].options}
    # Where an option is too much to assume, no objective is made with the others.
    more = settings_of([*ours, *settings], updated.config if is_configured(updated) else (), names, tell)
    if more and updated.trainer is None:
        tell(f"settings of the run from {', '.join(dict.fromkeys(setting.origin for setting in more))}")
    return replace(updated, settings=(*metadata.settings, *more))


def _with_options(metadata: RunMetadata, ours: Sequence[Stated], tell: Tell) -> RunMetadata:
    """Return the metadata with the options of a trainer, if these can be used."""
    trainer = str(ours[0].trainer)
    config, origins = _merged(ours, tell)
    length = _total_steps(ours, TRAINERS[trainer])
    release = next((config for config in ours if config.version), None)
    if release is not None:
        origins["trainer_version"] = release.version_origin
    updated = replace(
        metadata,
        trainer=trainer,
        trainer_version=release.version if release else metadata.trainer_version,
        config={**metadata.config, **config},
        origins={**metadata.origins, **origins},
    )
    version = updated.trainer_version or None
    is_older = version is not None and TRAINERS[trainer].release(version).state == "older"
    try:
        # The options of an older release are read by their names; its arithmetic confirms nothing.
        configure(updated, None, (), lenient=is_older)
    except UsageError as error:
        # A value that is not understood takes out what it decides, and no other option.
        if can_be_configured(updated):
            tell(f"{error}; the value is not used")
            return updated.with_total_steps(length)
        # Without them the default of this option would be taken for its value.
        tell(f"{error}; the options are not used")
        return replace(metadata, trainer=None).with_total_steps(length)
    places = dict.fromkeys(origins.values())
    tell(f"options of {trainer} from {', '.join(places)}")
    return updated.with_total_steps(length)


def _merged(stated: Sequence[Stated], tell: Tell) -> tuple[dict[str, object], dict[str, str]]:
    """Merge options of one trainer, the most certain first, and return their values and their origins."""
    options = {option.name: option for option in TRAINERS[str(stated[0].trainer)].options}
    config: dict[str, object] = {}
    origins: dict[str, str] = {}
    for statement in stated:
        for name, value in statement.values.items():
            if name not in options:
                continue
            if is_empty(value) and not options[name].optional:
                tell(f"{name} is empty in {statement.origin}: it is not used")
                continue
            if str(config.setdefault(name, value)) != str(value):
                tell(
                    f"{name} is {config[name]} in {origins[name]} and {value} in {statement.origin}: the first is used"
                )
            origins.setdefault(name, statement.origin)
    return config, origins


def _logs_as(stated: Trainer, writer: Trainer) -> bool:
    """Tell whether a trainer can have written a log with the names of another: its own, or that it is a patch of."""
    return writer.title in (stated.title, TRAINERS.get(stated.package_name, stated).title)


def is_empty(value: object) -> bool:
    """Tell a value that a table of options leaves open."""
    return value is None or (isinstance(value, str) and not value.strip())


def _total_steps(stated: Sequence[Stated], trainer: Trainer) -> int | None:
    """Return the optimizer steps that the run was planned for; -1 and the like leave that to the epochs."""
    values = (str(config.values.get(name)) for config in stated for name in trainer.roles.total_steps)
    return next((int(text) for text in values if text.isdecimal() and 0 < int(text) < 2**53), None)
