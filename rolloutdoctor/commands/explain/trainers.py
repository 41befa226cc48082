"""Trainers: what was read of each, how it is recorded, and its options with their defaults."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.commands.explain.layout import hanging, indented, titled, word

if TYPE_CHECKING:
    from rolloutdoctor.importers.base import Importer
    from rolloutdoctor.trainers.options import Option
    from rolloutdoctor.trainers.spec import Trainer

_OWN_LOOP = "record with rolloutdoctor.recorders.own_loop"


def lines() -> Mapping[str, str]:
    """Return the name of everyone whose objective is computed, or whose log is read, to what was read."""
    from rolloutdoctor.metric_names.table import TRAINERS as LOGGED
    from rolloutdoctor.trainers.table import TRAINERS

    read = {trainer.name: f"read: {_read(trainer)}" for trainer in TRAINERS.values()}
    return read | {name: "log alone" for name in LOGGED if name not in read}


def _read(trainer: "Trainer") -> str:
    return ", ".join(map(str, trainer.read_code))


def split(name: str) -> tuple[str, str]:
    """Return trainer and release of ``NAME[@RELEASE]``."""
    trainer, _, release = name.partition("@")
    return trainer, release


def is_known(name: str) -> bool:
    """Tell whether ``NAME[@RELEASE]`` names a trainer; the release may be none."""
    return split(name)[0] in lines()


def listing(*, verbose: bool = False) -> str:
    """List the trainers, a line each; verbose: and every option that is understood."""
    from rolloutdoctor.trainers.table import PLANNED, TRAINERS

    if not verbose:
        return "\n".join(
            [*_support(), hanging("", "`rolloutdoctor explain NAME` says more of one, with its options.", 0)]
        )
    every = [*_support(), "Options and defaults:", "", *(f"{whole(name)}\n" for name in TRAINERS)]
    return "\n".join([*every, *(f"{planned}: {why}." for planned, why in PLANNED.items())])


def _support() -> list[str]:
    """What is read and computed of each trainer, a line each."""
    from rolloutdoctor.trainers.table import TRAINERS

    support = [f"{'trainer':<15} metrics  code that was read, and how rollouts are recorded"]
    for name, read in lines().items():
        recording = _OWN_LOOP if name not in TRAINERS else TRAINERS[name].recording.get("*", "")
        support.append(hanging(f"{name:<15} {_names(name):>7}  ", f"{read}; {recording}" if recording else read, 25))
    support += [
        "",
        "metrics: names in its log that are understood; `rolloutdoctor explain metrics TRAINER` defines them.",
    ]
    return [*support, "`rolloutdoctor check PATH --from ?` lists the dumps that are read."]


def _names(trainer: str) -> int:
    from rolloutdoctor.metric_names.table import SAME, TRAINERS

    return len(TRAINERS.get(SAME.get(trainer, trainer), ()))


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a trainer, ``NAME[@RELEASE]``; verbose: with the meaning of every option.

    Raises:
        UsageError: if there is no such trainer, or the release is none.
    """
    from rolloutdoctor.trainers.table import TRAINERS, find

    wanted, version = split(name)
    if wanted in lines() and wanted not in TRAINERS:
        count = f"{_names(wanted)} names; `rolloutdoctor explain metrics {wanted}` defines them"
        return "\n".join(
            [f"{wanted} (trainer: its log alone is read)", "", titled("Log", count), titled("Record", _OWN_LOOP)]
        )
    if verbose:
        return whole(name)
    trainer = find(wanted)
    at = trainer.release(version).numbers if version else None
    options = [each for each in trainer.options if at is None or each.exists_at(at)]
    shown = ", ".join(f"{each.name}={word(_default(trainer, each, version))}" for each in options)
    listed = [f"{trainer.name} (trainer: {trainer.title})", "", titled("Read", _read(trainer))]
    listed += [titled(option, ", ".join(map(str, read))) for option, read in trainer.further.items()]
    listed += [*_recorded(trainer), titled("Log", f"{_names(wanted)} names; `rolloutdoctor explain metrics {wanted}`")]
    unknown = "; ".join(f"{names}: {why}" for names, why in trainer.log.not_recomputed.items())
    listed += [titled("", f"not recomputed: {unknown}")] if unknown else []
    listed += ["", titled("Faults", _faults(trainer)), ""]
    listed += [titled("Options", f"{len(options)}, with the defaults of {version or trainer.read_code[-1].name}"), ""]
    listed += [indented(shown, 2), ""]
    again = f"rolloutdoctor explain {name}"
    return "\n".join(
        [*listed, hanging("", f"`rolloutdoctor explain OPTION` explains one, `{again} -v` all of them.", 0)]
    )


def _recorded(trainer: "Trainer") -> Iterator[str]:
    """How its rollouts are recorded, what its dumps are, and what records more."""
    common = trainer.recording.get("*", "")
    if common:
        yield titled("Record", f"{common}.")
    for dump in dumps(trainer.name):
        yield titled("Dump", dump.summary)
    for column, words in trainer.recording.items():
        if column != "*":
            yield titled("", f"{column}: {words.removeprefix(common).lstrip(',; ')}")


def dumps(trainer: str) -> "list[Importer]":
    """Return the importers of what a trainer writes by itself: they have its name, or begin with it."""
    from rolloutdoctor.importers.table import IMPORTERS

    return [importer for importer in IMPORTERS if f"{importer.name}-".startswith(f"{trainer}-")]


def _faults(trainer: "Trainer") -> str:
    """The fixes that are about what it computes, those of some releases with them."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    faults = [
        f"{fix.name} ({fix.code}{f', {fix.releases[trainer.name]}' if trainer.name in fix.releases else ''})"
        for fix in FIXES.values()
        if trainer.name in fix.trainers()
    ]
    return f"{', '.join(faults)}: `rolloutdoctor explain FIX`" if faults else "none that a fix is about"


def _default(trainer: "Trainer", option: "Option", version: str) -> object:
    from rolloutdoctor.trainers.releases import parse_version

    return option.default_at(trainer.release(version).numbers if version else parse_version(trainer.newest))


def whole(name: str) -> str:
    """Return every option of a trainer, ``NAME[@RELEASE]``, with what it means.

    Raises:
        UsageError: if there is no such trainer, or the release is none.
    """
    from rolloutdoctor.trainers.releases import parse_version
    from rolloutdoctor.trainers.table import find

    wanted, version = split(name)
    trainer = find(wanted)
    at = trainer.release(version).numbers if version else parse_version(trainer.newest)
    defaults = version or trainer.read_code[-1].name
    lines = [f"{trainer.name}  (read: {_read(trainer)}; defaults of {defaults})"]
    for option in trainer.options:
        if option.exists_at(at):
            lines += [f"  {option.name} = {word(option.default_at(at))}", indented(meaning(option), 6)]
    if trainer.log.not_recomputed:
        lines.append("  logged metrics that are not recomputed:")
    lines += [indented(f"{names}: {why}", 6) for names, why in trainer.log.not_recomputed.items()]
    return "\n".join(lines)


def meaning(option: "Option") -> str:
    """Say what an option means, what it takes, and how it changed."""
    words = f"{option.meaning}; takes {option.wanted()}"
    if option.computed is not None:
        able = ", ".join(word(value) for value in option.computed)
        verb = "its loss is computed for" if option.loss_alone else "computed here:"
        words += f"; {verb} {able} ({option.why_not})"
    for release, before in reversed(option.changes):
        words += f"; before {release} the default was {word(before)}"
    words += f"; from {option.since} on" if option.since else ""
    return words + "".join(
        f"; {word(value)} from {since} on" for value, since in option.values_since.items() if since != option.since
    )


def body(name: str) -> dict[str, object]:
    """Return a trainer, ``NAME[@RELEASE]``, for programs.

    Raises:
        UsageError: if there is no such trainer, or the release is none.
    """
    from rolloutdoctor.trainers.releases import parse_version
    from rolloutdoctor.trainers.table import find

    wanted, version = split(name)
    trainer = find(wanted)
    at = trainer.release(version).numbers if version else parse_version(trainer.newest)
    return {
        "name": trainer.name,
        "version": version or trainer.read_code[-1].name,
        "read": [str(code) for code in trainer.read_code],
        "options": [option_body(option, option.default_at(at)) for option in trainer.options if option.exists_at(at)],
        "not_recomputed": dict(trainer.log.not_recomputed),
    }


def option_body(option: "Option", default: object) -> dict[str, object]:
    """Return an option for programs."""
    return {
        "name": option.name,
        "default": default,
        "takes": option.wanted(),
        "computed": None if option.computed is None else list(option.computed),
        "loss_alone": option.loss_alone,
        "decides": option.decides,
        "meaning": option.meaning,
        "changed": [{"in": release, "before": before} for release, before in option.changes],
        "since": option.since or None,
        "until": option.until or None,
    }


def bodies() -> list[dict[str, object]]:
    """Return every trainer whose objective is computed, for programs."""
    from rolloutdoctor.trainers.table import TRAINERS

    return [body(name) for name in TRAINERS]
