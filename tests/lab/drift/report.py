"""What changed between the release that was read and another, and the page that says so."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from drift import source
from drift.watched import PACKAGES

from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

KNOWN = Path(__file__).with_name("read.json")
PAGE = Path(__file__).with_name("results.md")


@dataclass(frozen=True)
class Move:
    """Differences of a release from the one that was read.

    Attributes:
        compared: whether the release that was read was on the index.
        changed: watched functions whose syntax is another.
        gone: watched functions that it does not have under their names.
        came: options with their defaults that only the newer has.
        went: options that only the read one had.
        defaults: options with another default, as ``name: old -> new``.
    """

    package: str
    read: str
    there: str
    compared: bool = True
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    came: list[str] = field(default_factory=list)
    went: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)

    @property
    def is_newer(self) -> bool:
        """Tell whether there is a release after the one that was read."""
        return self.compared and parse_version(self.there) > parse_version(self.read)

    @property
    def state(self) -> str:
        """What follows for a run of the release."""
        if not self.compared:
            return "not compared: what was read is in git alone"
        if not self.is_newer:
            return "read" if self.there == self.read and not self.functions else "differs from what was read"
        return "not read: functions changed" if self.functions else "not read: no watched function changed"

    @property
    def functions(self) -> list[str]:
        """Functions that are not what was read."""
        return [*self.changed, *(f"{name} (gone)" for name in self.gone)]

    def __str__(self) -> str:
        return f"{self.package} {self.there} (read: {self.read}): {self.state}"


def known() -> dict[str, dict]:
    """By package: the release that was read, where results of it are stored, its functions and options."""
    return json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}


def store(wheel: Path, goldens: Path) -> None:
    """Write a release as read."""
    found, package = source.fingerprint(wheel), source.package_in(wheel)
    place = goldens.resolve().relative_to(KNOWN.parents[3]).as_posix()
    of_package = {"release": source.release_in(wheel), "goldens": place, **found._asdict()}
    text = json.dumps(known() | {package: of_package}, indent=1, sort_keys=True)
    KNOWN.write_text(text + "\n", encoding="utf-8")


def compare(package: str, wheel: Path, before: dict | None = None) -> Move:
    """Compare a wheel with the release that was read."""
    old = before or known().get(package)
    if old is None:
        return Move(package, PACKAGES[package].read, source.release_in(wheel), compared=False)
    new = source.fingerprint(wheel, package)
    was, now = old["options"], new.options
    return Move(
        package,
        old["release"],
        source.release_in(wheel),
        changed=[name for name, key in new.functions.items() if key != old["functions"].get(name)],
        gone=[name for name in old["functions"] if name not in new.functions],
        came=[f"{name} = {value}" for name, value in now.items() if name not in was],
        went=[name for name in was if name not in now],
        defaults=[f"{name}: {was[name]} -> {now[name]}" for name in now if was.get(name, now[name]) != now[name]],
    )


HEAD = """# Releases of the trainers

`make drift` writes this file: the newest release of every package on the index, compared with the one that was read. It
compares the syntax of watched functions (estimators, losses, KL, masks, metrics; `tests/lab/drift/watched.py`), without
comments and docstrings, and the options with their defaults. A release after the last that was read is *not read*: of a
run that states it no difference of numbers is confirmed, until the trainer's own functions of that release were called
and their results stored (docs/contribute/trainer.md).
"""


def page(moves: list[Move], day: str) -> str:
    """The page."""
    lines = [
        HEAD,
        f"As of {day}:\n",
        "| package | newest read | newest there | | compared by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for move in moves:
        made_by = PACKAGES[move.package].goldens
        lines.append(f"| {move.package} | {move.read} | {move.there} | {move.state} | `{made_by}` |")
    lines.append("\nNot on the index; main is named by its commit (`--trainer NAME@COMMIT`):\n")
    lines += ["| trainer | read |", "| --- | --- |"]
    whole = {name: package for name, package in PACKAGES.items() if not package.on_index}
    on_index = {package.trainer for package in whole.values()}
    for trainer in TRAINERS.values():
        if trainer.package_name not in whole and trainer.name not in on_index:
            lines.append(f"| {trainer.title} | {'; '.join(map(str, trainer.read_code))} |")
    for move in moves:
        parts = {"functions that changed": move.functions, "options that came": move.came}
        parts |= {"options that went": move.went, "defaults that changed": move.defaults}
        told = [
            f"\n{title}:\n\n" + "\n".join(f"- `{each}`" for each in each_of)
            for title, each_of in parts.items()
            if each_of
        ]
        if told:
            lines += [f"\n## {move.package} {move.read} -> {move.there}", *told]
    return "\n".join(lines) + "\n"
