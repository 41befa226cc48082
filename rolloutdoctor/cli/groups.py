"""Groups of options that several commands share: a group is one argument of a command, its fields are the options."""

import functools
import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.help import RARE
from rolloutdoctor.cli.inputs import note_file
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.engine.options import ReadOptions
    from rolloutdoctor.opening.dumps import ConvertOptions

    Options = TypeVar("Options", bound=ReadOptions)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its arguments that are groups: dataclasses, whose fields are options."""
    taken = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for declared in taken.parameters.values():
        parameter, group = declared.replace(kind=inspect.Parameter.KEYWORD_ONLY), declared.annotation
        if is_dataclass(group) and isinstance(group, type):
            groups[declared.name] = group
            options = [
                parameter.replace(name=field.name, annotation=field.type, default=field.default) for field in _of(group)
            ]
            parameters += options
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def inner(**values: Any) -> None:  # noqa: ANN401 - what the command takes
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in _of(group)})
        command(**values)

    signature = taken.replace(parameters=parameters)
    # What `inspect.signature` gives back, which typer makes the options from.
    inner.__signature__ = signature  # type: ignore[attr-defined]  # a function has no such attribute of its own
    inner.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return inner


def _of(group: type[Any]) -> list[Any]:
    return [field for field in fields(group) if field.init]


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Options about a trainer's own dump, which commands take in place of a run file.

    Attributes:
        dump: what they say.
    """

    importer: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            envvar="ROLLOUTDOCTOR_FROM",
            help="Importer for a trainer's own dump, if it is not recognised; an unknown name lists all.",
        ),
    ] = None
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="COLUMN=WHERE|@FILE",
            help="Read COLUMN from this field, e.g. reward=score, or fields as a TOML file says; repeatable.",
        ),
    ] = None
    map_file: Annotated[
        str | None,
        typer.Option("--map-file", metavar="FILE.toml", hidden=True, help="The same as --map @FILE.toml."),
    ] = None
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            rich_help_panel=RARE,
            help="Load pickled torch files, which can run code. Only for files you trust.",
        ),
    ] = False
    dump: "ConvertOptions" = field(init=False)

    def __post_init__(self) -> None:
        """Read the mapping; the command line goes over the file.

        Raises:
            UsageError: if a mapping cannot be read.
        """
        from rolloutdoctor.opening.dumps import ConvertOptions

        columns = self.columns or []
        files = [text.removeprefix("@") for text in columns if text.startswith("@")]
        mapping: dict[str, str] = {}
        for file in [*([self.map_file] if self.map_file is not None else []), *files]:
            mapping |= _read_map(file)
        for text in columns:
            if text.startswith("@"):
                continue
            name, equals, where = text.partition("=")
            if not equals or not name.strip() or not where.strip():
                raise UsageError(f"--map {text}: expected COLUMN=WHERE, such as reward=score, or @FILE.toml")
            mapping[name.strip()] = where.strip()
        object.__setattr__(self, "dump", ConvertOptions(self.importer, mapping, self.allow_pickle))


@dataclass(frozen=True, kw_only=True)
class Source(Dump):
    """Options about who made a run."""

    trainer: opt.TrainerOption = None
    settings: opt.SetOption = None
    trainer_config: opt.TrainerConfigOption = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Options about which rows to read."""

    steps: opt.StepsOption = None
    split: opt.SplitOption = None


@dataclass(frozen=True, kw_only=True)
class Computed(Part):
    """Options about which rows to read, and how to compute with them."""

    device: opt.DeviceOption = opt.Device.auto
    dtype: opt.DtypeOption = opt.Dtype.float32


@dataclass(frozen=True, kw_only=True)
class Measured(Computed):
    """Options about which rows to read, and how to measure them into tables."""

    memory: opt.MemoryOption = "1GB"


def read_options(kind: "type[Options]", source: Source, part: Part, **more: Any) -> "Options":  # noqa: ANN401 - its fields
    """Put the options of a command together.

    Args:
        kind: of the options.
        source: who made the run.
        part: what to read of it, and how to compute.
        more: further fields.

    Raises:
        UsageError: if one of them cannot be read.
    """
    from rolloutdoctor.engine.tables_on_disk import MemoryBound
    from rolloutdoctor.io.run import StepRange

    steps = None if part.steps is None else StepRange.parse(part.steps)
    layers = opt.layers(source.settings, source.trainer_config)
    chosen = {name: value.value for name in ("split", "device", "dtype") if (value := getattr(part, name, None))}
    if isinstance(part, Measured):
        more["memory"] = MemoryBound.parse(part.memory)
    return kind(trainer=source.trainer, layers=layers, steps=steps, **chosen, **more)


def _read_map(path: str) -> dict[str, str]:
    note_file(path)
    called = f"--map @{shown(path)}"
    text = read_small(path, name=called, expected="give a TOML file, such as reward = 'score'")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{called}: not TOML (nested too deeply)") from None
    except ValueError as error:
        raise UsageError(f"{called}: not TOML ({error})") from None
    for name, where in table.items():
        if not isinstance(where, str):
            raise UsageError(f"{called}: {name} has to be a name in quotes, such as reward = 'score'")
    return table
