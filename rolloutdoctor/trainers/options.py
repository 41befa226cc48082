"""Options of trainers, and their configuration from values of several origins."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from rolloutdoctor.results.errors import UnstatedError, UsageError, nearest
from rolloutdoctor.results.findings import Setting
from rolloutdoctor.trainers.releases import Release, parse_version

OptionKind = Literal["number", "integer", "flag", "word", "numbers", "any"]


@dataclass(frozen=True, eq=False)
class Option:
    """One option of a trainer, under its own name.

    Attributes:
        name: full name; verl's are dotted.
        kind: how its values are read.
        default: upstream's default in the newest version known.
        meaning: one line.
        changes: versions that changed the default, each with the default before it, oldest first.
        since: the first version that has the option; empty: every one. Before it holds what `changes` says.
        until: the first version that has it no more; empty: none.
        values_since: values that came later than the option, with their first version.
        choices: the values that upstream accepts, for words.
        computed: the values that are computed here; None means all. Another value that upstream accepts is an error,
            unless it changes the `loss_alone`.
        low: smallest value, inclusive, or None.
        high: largest value, inclusive, or None.
        optional: True if null is a value; where it is the default, it is one.
        decides: True if it can change a number that is reported.
        only_with: it decides only while each of these options has one of the values.
        yields: a shortened name that fits this option and another one means the other.
        spellings: other spellings of values, such as ``True`` for ``group``.
        why_not: why another value is not computed.
        loss_alone: another value changes the loss and what is logged of it, and nothing before: all but the loss is
            computed then, as it is with the first of `computed`.
        follows: the default as other options have it, given those before it in the table and the version; None: it is
            the same whatever they say.
        works_after: the last release in which the option changes nothing, and why; None: it always works.
    """

    name: str
    kind: OptionKind
    default: object
    meaning: str
    changes: tuple[tuple[str, object], ...] = ()
    since: str = ""
    until: str = ""
    values_since: Mapping[object, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    computed: tuple[object, ...] | None = None
    low: float | None = None
    high: float | None = None
    optional: bool = False
    decides: bool = True
    only_with: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    yields: bool = False
    spellings: Mapping[object, object] = field(default_factory=dict)
    why_not: str = "this version does not compute it"
    loss_alone: bool = False
    follows: Callable[[Mapping[str, Setting], tuple[int, ...]], object] | None = None
    works_after: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Take null where it is the default."""
        object.__setattr__(self, "optional", self.optional or self.default is None)

    def is_idle(self, settings: Mapping[str, Setting]) -> bool:
        """Return True if other options leave it nothing to decide."""
        return any(settings[other].value not in values for other, values in self.only_with.items())

    def works_at(self, version: tuple[int, ...]) -> bool:
        """Return False if upstream takes the option at a version and does not use it."""
        return self.works_after is None or version > parse_version(self.works_after[0])

    def default_at(self, version: tuple[int, ...]) -> object:
        """Upstream's default at a version, or what its code does without the option."""
        return next((before for end, before in self.changes if version < parse_version(end)), self.default)

    def exists_at(self, version: tuple[int, ...]) -> bool:
        """Return True if upstream has the option at a version."""
        came = not self.since or version >= parse_version(self.since)
        return came and (not self.until or version < parse_version(self.until))

    def refuse_unknown(self, value: object, version: tuple[int, ...], origin: str) -> None:
        """Refuse a value that upstream has no option for at a version, unless its code does the same without.

        Raises:
            UsageError: if the option or its value came later, or is gone.
        """
        shown = ".".join(map(str, version))
        if not self.exists_at(version):
            if value != self.default_at(version):
                words = (
                    f"came with {self.since}"
                    if self.since and version < parse_version(self.since)
                    else (f"is gone since {self.until}")
                )
                raise UsageError(f"{self.name} = {value} ({origin}): the option {words}, and the run is of {shown}")
        elif isinstance(value, str | bool) and value in self.values_since:
            since = self.values_since[value]
            if version < parse_version(since):
                raise UsageError(f"{self.name} = {value} ({origin}): it came with {since}, and the run is of {shown}")

    def read(self, value: object, origin: str) -> object:
        """Turn a value into the option's type.

        Raises:
            UsageError: if it is of the wrong type, out of range, unknown, or not computed here.
        """
        wanted = self.wanted()
        typed = self._typed(value)
        if typed is _WRONG:
            raise UsageError(f"{self.name} = {value!r} ({origin}): expected {wanted}")
        if isinstance(typed, int | float) and not isinstance(typed, bool):
            too_low = self.low is not None and typed < self.low
            # What an option of any kind takes is for its trainer's table to say.
            unbounded = self.kind != "any" and isinstance(typed, float) and not math.isfinite(typed)
            if unbounded or too_low or (self.high is not None and typed > self.high):
                raise UsageError(f"{self.name} = {value!r} ({origin}) is out of range: expected {wanted}")
        if self.choices and typed is not None and typed not in self.choices:
            close = nearest(str(typed), list(self.choices))
            raise UsageError(f"{self.name} = {value!r} ({origin}): expected {wanted}{close}")
        if self.computed is not None and typed not in self.computed and not self.loss_alone:
            able = ", ".join(str(each) for each in self.computed)
            raise UsageError(f"{self.name} = {typed} ({origin}): {self.why_not} (computed: {able})")
        return typed

    def below(self, value: object) -> float | None:
        """Return a finite number that is less than the option takes, or None of any other value."""
        typed = self._typed(value)
        if self.low is None or isinstance(typed, bool) or not isinstance(typed, int | float):
            return None
        return float(typed) if -math.inf < typed < self.low else None

    def leaves_loss_unknown(self, settings: Mapping[str, Setting]) -> bool:
        """Return True if its value changes the loss in a way that is not computed here."""
        able = self.computed is None or settings[self.name].value in self.computed
        return self.loss_alone and not able and not self.is_idle(settings)

    def wanted(self) -> str:
        """Words for what the option takes."""
        text = ", ".join(self.choices) if self.choices else _KIND_WORDS[self.kind]
        if self.choices:
            text = f"one of {text}"
        low = [] if self.low is None else [f">= {self.low:g}"]
        bounds = low if self.high is None else [*low, f"<= {self.high:g}"]
        text += f" {' and '.join(bounds)}" if bounds else ""
        return text + (" or null" if self.optional else "")

    def _typed(self, value: object) -> object:
        if value in self.spellings if isinstance(value, bool | str | int) else False:
            return self.spellings[value]
        if isinstance(value, str):
            value = value.strip()
            if self.kind not in ("word", "any") or self.optional:
                value = _LITERALS.get(value.lower(), value)
        if value is None:
            return None if self.optional else _WRONG
        match self.kind:
            case "flag":
                return value if isinstance(value, bool) else _WRONG
            case "number" | "integer":
                return _number(value, whole=self.kind == "integer")
            case "numbers":
                if isinstance(value, str):
                    inside = re.fullmatch(r"\[(.*)\]|\((.*)\)|([^][()]*)", value, re.DOTALL)
                    value = None if inside is None else next(each for each in inside.groups() if each is not None)
                parts = value.split(",") if isinstance(value, str) else value
                if not isinstance(parts, Iterable):
                    return _WRONG
                numbers = [_number(part, whole=False) for part in parts]
                is_sound = all(isinstance(each, float) and math.isfinite(each) for each in numbers)
                return tuple(numbers) if is_sound else _WRONG
            case "word":
                return value if isinstance(value, str) else _WRONG
            case _:
                return value


_WRONG = object()
_LITERALS = {"true": True, "false": False, "null": None, "none": None}
_KIND_WORDS = {
    "number": "a number",
    "integer": "a whole number",
    "flag": "true or false",
    "word": "a word",
    "numbers": "numbers separated by commas",
    "any": "a value",
}


def _number(value: object, *, whole: bool) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        return _WRONG
    try:
        number = float(value)  # type: ignore[arg-type]  # anything that is not a number raises
    except (TypeError, ValueError, OverflowError):
        return _WRONG
    if not whole:
        return number
    return int(number) if number == number and abs(number) < 2**63 and number == int(number) else _WRONG


@dataclass(frozen=True)
class Layer:
    """Option values from one place.

    Attributes:
        origin: words for the place.
        values: option name to value.
        strict: True if a name that the trainer does not have is an error; False for files that hold other options.
        trainer: whose options they are, if that is certain; else empty.
    """

    origin: str
    values: Mapping[str, object]
    strict: bool = True
    trainer: str = ""


@dataclass(frozen=True)
class Refused:
    """A value of a file that is not understood.

    Attributes:
        why: a sentence.
        below: the number that it is, where it is less than the option takes; else None.
    """

    why: str
    below: float | None = None


@dataclass(frozen=True)
class Config:
    """Every option of a trainer with its value and where that came from.

    Attributes:
        version: the release, as stated or assumed.
        settings: option to its value.
        is_release: False where nobody stated the release, or it is a development version between two releases.
        unusable: options of files with a value that is not understood; they have their defaults.
        unknown: names in files that are no option that is understood here.
    """

    version: tuple[int, ...]
    settings: Mapping[str, Setting]
    is_release: bool = True
    unusable: Mapping[str, Refused] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> object:
        return self.settings[name].value

    def needs(self, name: str) -> None:
        """Refuse to assume an option that is too much to assume.

        Raises:
            UnstatedError: if nothing states it.
        """
        if not self.settings[name].is_stated:
            raise UnstatedError(f"the run does not say its {name}; state it with --set {name}=NAME")

    def number(self, name: str) -> float:
        """A number that is set."""
        value = self[name]
        assert isinstance(value, int | float)
        return float(value)

    def word(self, name: str) -> str:
        """A word that is set."""
        value = self[name]
        assert isinstance(value, str)
        return value

    def optional_number(self, name: str) -> float | None:
        """A number, or None."""
        return None if self[name] is None else self.number(name)


def resolve(
    options: tuple[Option, ...],
    version: tuple[int, ...],
    layers: Iterable[Layer],
    *,
    trainer: str,
    release: Release | None = None,
    lenient: bool = False,
) -> Config:
    """Merge layers, most important first, over the trainer's defaults.

    Names may be shortened from the left as long as they stay unique: ``actor.clip_ratio_low``.

    Args:
        options: those of the trainer.
        version: of the trainer.
        layers: values, most important first.
        trainer: its name.
        release: whether the code of the version was read.
        lenient: a value of a file that cannot be used is listed as `Config.unusable`, and the default stands for it.

    Raises:
        UsageError: for an unknown or ambiguous name in a strict layer, or a value that cannot be used.
    """
    names = {option.name: option for option in options}
    settings: dict[str, Setting] = {}
    unusable: dict[str, Refused] = {}
    unknown: dict[str, None] = {}
    for layer in layers:
        spelt: dict[str, str] = {}
        misnamed: list[UsageError] = []
        for key, value in layer.values.items():
            try:
                name = _full_name(key, names, layer, trainer)
            except UsageError as error:
                # It may belong to another one that is refused, which is said first.
                misnamed.append(error)
                continue
            if name is None:
                unknown[key] = None
                continue
            if spelt.setdefault(name, key) != key and layer.values[spelt[name]] != value:
                raise UsageError(f"{spelt[name]} and {key} are both {name} ({layer.origin}): keep one of them")
            # A value that is overridden need not be one that is understood here.
            if name in settings or name in unusable:
                continue
            try:
                typed = names[name].read(value, layer.origin)
                names[name].refuse_unknown(typed, version, layer.origin)
            except UsageError as error:
                if layer.strict or not lenient:
                    raise
                unusable[name] = Refused(str(error), names[name].below(value))
            else:
                settings[name] = Setting(typed, layer.origin)
        if misnamed:
            raise misnamed[0]
    _fill_defaults(settings, options, version, trainer, "" if release is None else release.state)
    ordered = {option.name: settings[option.name] for option in options}
    return Config(version, ordered, unusable=unusable, unknown=tuple(unknown))


def _fill_defaults(
    settings: dict[str, Setting], options: tuple[Option, ...], version: tuple[int, ...], trainer: str, state: str
) -> None:
    """Add the defaults of options that no layer sets; one that decides nothing is not assumed."""
    for option in options:
        if option.name not in settings:
            follows = option.follows if option.exists_at(version) else None
            value = option.default_at(version) if follows is None else follows(settings, version)
            settings[option.name] = _default(option, value, version, trainer, state)
    for option in options:
        if settings[option.name].assumed and option.is_idle(settings):
            settings[option.name] = replace(settings[option.name], assumed=False)


def unknown_loss(option: str, why: str) -> str:
    """Say that an option, named with its value, leaves the loss unknown."""
    return f"{option} changes the loss in a way that is not computed here: {why}"


def unused(options: Iterable[Option], config: Config) -> list[str]:
    """Say which options were set and change nothing in the version of the run, one sentence each."""
    entries = []
    for option in options:
        setting = config.settings.get(option.name)
        if setting is None or setting.value == option.default or option.works_at(config.version):
            continue
        assert option.works_after is not None  # it would work
        last, why = option.works_after
        entries.append(
            f"{option.name} = {setting.value} ({setting.origin}) has no effect: up to release {last} {why}; if the run "
            "was made with later code, pass --trainer NAME@VERSION"
        )
    return entries


@cache
def _default(option: Option, value: object, version: tuple[int, ...], trainer: str, state: str) -> Setting:
    """An upstream default: an assumption as long as nothing shows which options the run was started with."""
    exists, number = option.exists_at(version), ".".join(map(str, version))
    origin = f"default of {trainer} {number}" if exists else f"{trainer} {number} has no such option"
    if exists and state in ("older", "not read"):
        origin = f"default of the {trainer} that was read"
    # Reading refuses a default that is not computed here, like any other value.
    return Setting(option.read(value, origin), origin, assumed=option.decides and exists)


def _full_name(key: str, names: Mapping[str, Option], layer: Layer, trainer: str) -> str | None:
    if key in names:
        return key
    matches = [name for name in names if name.endswith("." + key)]
    matches = [name for name in matches if not names[name].yields] or matches
    if len(matches) == 1:
        return matches[0]
    if not layer.strict:
        return None
    if matches:
        raise UsageError(f"{key!r} ({layer.origin}) could be {' or '.join(matches)}: write more of the name")
    tails = {name.rpartition(".")[2]: name for name in names}
    close = nearest(key, [*names, *tails])
    raise UsageError(
        f"{trainer} has no option {key!r} that is understood here ({layer.origin}){close}; "
        f"`rolloutdoctor explain {trainer}` lists them"
    )
