"""Who made the run and with which options: layers of settings become a trainer, a configuration and an objective."""

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rolloutdoctor.io.locations.small_files import MOST_BYTES, MOST_OPTIONS, flat, once, read_small
from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import UnstatedError, UsageError
from rolloutdoctor.results.findings import Setting
from rolloutdoctor.search.hypotheses.fixes import ChosenFix
from rolloutdoctor.trainers.dialects.table import dialect_of
from rolloutdoctor.trainers.options import Config, Layer, resolve
from rolloutdoctor.trainers.releases import Release
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import find

FROM_NAMES = "newest release that logs such metrics"
"""Start of the origin of a version that the names in a log leave."""

FROM_OPTIONS = "newest release with such a configuration"
"""Start of the origin of a version that the options of a whole configuration leave."""

_TRAINER_FILE = "--trainer-config takes a JSON, TOML or YAML file"


_MOST_YAML = 2**20
"""Bytes of YAML, which PyYAML reads slowly."""


@cache
def _loader() -> Any:  # noqa: ANN401 - a class of a package that may be absent
    import yaml

    class Loader(yaml.SafeLoader):
        """Counts what merge keys bring: each level of a few lines can be ten times the one before."""

        brought = 0

        def flatten_mapping(self, node: Any) -> None:  # noqa: ANN401
            super().flatten_mapping(node)
            self.brought += len(node.value)
            if self.brought > MOST_OPTIONS:
                raise yaml.YAMLError(f"more than {MOST_OPTIONS:,} options")

    return Loader


@dataclass(frozen=True)
class Configured:
    """Trainer and options that a run was made with.

    Attributes:
        trainer: who made it.
        version: its version, as given or assumed.
        version_origin: where the version came from.
        version_assumed: True if nothing said which version.
        config: every option with its origin.
        objective: what it computes, with the fixes that it already had.
        release: whether the code of its version was read.
        fixes: their names.
    """

    trainer: Trainer
    version: str
    version_origin: str
    version_assumed: bool
    config: Config
    objective: Objective
    release: Release
    fixes: tuple[str, ...] = ()

    def settings(self) -> dict[str, Setting]:
        """Options with their origins, the version first."""
        version = Setting(self.version, self.version_origin, assumed=self.version_assumed)
        fixes = {"fix": Setting(", ".join(self.fixes), "command line")} if self.fixes else {}
        there = {option.name for option in self.trainer.options if option.exists_at(self.config.version)}
        settings = {name: setting for name, setting in self.config.settings.items() if name in there}
        return {"version": version, **settings, **fixes}


def configure(
    metadata: RunMetadata,
    trainer: str | None,
    layers: Sequence[Layer],
    fixes: Sequence[ChosenFix] = (),
    *,
    lenient: bool = False,
) -> Configured | None:
    """Put the layers of the user over what the file says of itself.

    Args:
        metadata: of the run file.
        trainer: ``NAME`` or ``NAME@VERSION`` as the user gave it, or None.
        layers: option values of the user, most important first.
        fixes: fixes that the run already had.
        lenient: for verdicts, which numbers of an older release or beside a value that is not understood do not
            confirm; without it these are refused.

    Returns:
        None if neither the user nor the file says which trainer made the run, or with which options.

    Raises:
        UsageError: for an unknown trainer, version or option, or a value that cannot be used.
    """
    name, _, version = (trainer or "").partition("@")
    same = not name or name == metadata.trainer
    name = name or metadata.trainer or next((layer.trainer for layer in layers if layer.trainer), "")
    other = next((layer for layer in layers if layer.trainer not in ("", name)), None)
    if other is not None:
        raise UsageError(f"{other.origin}: options of {other.trainer}, and the run is of {name}")
    if not name:
        if fixes or any(layer.values for layer in layers):
            raise UsageError("options were set, but nothing says which trainer they are of: add --trainer NAME")
        return None
    spec = find(name)
    version, origin, assumed = _version(spec, version, metadata if same else RunMetadata())
    release = spec.release(version)
    if release.state == "older" and not lenient:
        raise UsageError(
            f"{name} {version} ({origin}) is older than {spec.oldest}, the oldest whose arithmetic is known here; "
            f"name the version that is closest with --trainer {name}@VERSION"
        )
    stated = [*layers, *(layers_of(metadata) if same else [])]
    config = resolve(spec.options, release.numbers, stated, trainer=name, release=release, lenient=lenient)
    config = replace(config, is_release=not assumed and "dev" not in version)
    release = spec.whole_release(release, config)
    try:
        objective = spec.objective_of(config)
    except UnstatedError:
        if trainer or fixes or any(layer.values for layer in layers):
            raise
        # The rules that look at the rows alone can still run.
        return None
    for fix in fixes:
        objective = fix.apply(objective)
    labels = tuple(fix.label for fix in fixes)
    return Configured(spec, version, origin, assumed, config, objective, release, labels)


def _version(spec: Trainer, asked: str, metadata: RunMetadata) -> tuple[str, str, bool]:
    """Choose the version as asked, else the file's, else the newest; with its origin, and True if nothing states it."""
    if asked:
        return asked, "--trainer", False
    if metadata.trainer_version:
        origin = metadata.origin_of("trainer_version")
        return metadata.trainer_version, origin, origin.startswith((FROM_NAMES, FROM_OPTIONS))
    return spec.read_code[-1].name, f"newest {spec.name} known here", True


def layers_of(metadata: RunMetadata) -> list[Layer]:
    """What a run says of its options, by where that was read."""
    by_origin: dict[str, dict[str, object]] = {}
    for name, value in metadata.config.items():
        by_origin.setdefault(metadata.origin_of(name), {})[name] = value
    return [Layer(origin, values, strict=False) for origin, values in by_origin.items()]


def can_be_configured(metadata: RunMetadata) -> bool:
    """Tell whether the options that a run states can be used, but for values that are not understood."""
    try:
        configure(metadata, None, (), lenient=True)
    except UsageError:
        return False
    return True


def is_configured(metadata: RunMetadata) -> bool:
    """Tell whether an objective is made of what a run states of itself."""
    try:
        return configure(metadata, None, (), lenient=True) is not None
    except UsageError:
        return False


def read_settings(texts: Sequence[str], origin: str) -> Layer:
    """Read ``KEY=VALUE`` texts.

    Raises:
        UsageError: if one has no ``=``, or a key is given twice with different values.
    """
    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(f"{text!r} ({origin}): expected KEY=VALUE, such as beta=0.04")
        if values.get(key, value) != value:
            raise UsageError(f"{key} is set to {values[key]} and to {value} ({origin}): keep one of them")
        values[key] = value
    return Layer(origin, values)


def read_trainer_config(path: str) -> Layer:
    """Read a trainer's own configuration file, JSON, TOML or YAML; nested keys are joined with dots.

    Raises:
        UsageError: if it cannot be read, or YAML support is not installed.
    """
    is_yaml = path.endswith((".yaml", ".yml"))
    text = read_small(path, expected=_TRAINER_FILE, most=_MOST_YAML if is_yaml else MOST_BYTES)
    name = shown(path)
    body: object
    if is_yaml:
        import yaml

        try:
            body = yaml.load(text, Loader=_loader())
        except RecursionError:
            raise UsageError(f"{name}: nested too deeply; {_TRAINER_FILE}") from None
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            # PyYAML raises anything on a tag that does not fit its value.
            where = str(getattr(error, "problem_mark", "")).strip()
            raise UsageError(f"{name}: not YAML {where}".rstrip()) from None
    elif path.endswith(".toml"):
        try:
            body = tomllib.loads(text)
        except (ValueError, RecursionError):
            raise UsageError(f"{name}: not TOML; {_TRAINER_FILE}") from None
    else:
        try:
            body = json.loads(text, object_pairs_hook=once)
        except RecursionError:
            raise UsageError(f"{name}: nested too deeply; {_TRAINER_FILE}") from None
        except ValueError:
            raise UsageError(f"{name}: not JSON; {_TRAINER_FILE}") from None
    if not isinstance(body, dict):
        raise UsageError(f"{name}: expected an object of options")
    return Layer(os.fspath(path), _referred(flat(body, name)), strict=False)


def read_trainer_layers(path: str, stated: Collection[str] = ()) -> list[Layer]:
    """Read a configuration file of a trainer, or of a program that runs one.

    Args:
        path: of the file.
        stated: options that something more important states.

    Raises:
        UsageError: if it cannot be read, or the program computes something else with it.
    """
    layer = read_trainer_config(path)
    dialect = dialect_of(layer.values)
    return [layer] if dialect is None else dialect.layers(layer.values, layer.origin, stated)


_REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
_MOST_REFERENCES = 8


def _referred(values: Mapping[str, object]) -> dict[str, object]:
    """Replace OmegaConf's references to other keys, ``${grpo.normalize_rewards}``, by what these hold.

    >>> _referred({"a.b": True, "c": "${a.b}", "d": "${c}", "e": "${f}"})
    {'a.b': True, 'c': True, 'd': True, 'e': '${f}'}
    """
    resolved = dict(values)
    for name in values:
        for _ in range(_MOST_REFERENCES):
            match = _REFERENCE.fullmatch(str(resolved[name]))
            if match is None or match[1] not in values:
                break
            resolved[name] = values[match[1]]
    return resolved
