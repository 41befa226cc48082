"""Which code of a trainer was read and compared, and what that says of a release that a run names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import READ, ReleaseState

_SHORT = 7
"""Characters by which a commit is named."""

_COMMIT = re.compile(rf"(?:^|\+g|[^0-9a-z])([0-9a-f]{{{_SHORT},40}})(?![0-9a-z])")


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version, three at least: ``1.10.0.dev0`` and ``1.10`` give ``(1, 10, 0)``.

    Raises:
        UsageError: if it does not start with a number.
    """
    match = re.match(r"v?([0-9]{1,9}(?:\.[0-9]{1,9}){0,9})(?!\.?[0-9])", text)
    if match is None:
        raise UsageError(f"{text[:80]!r} is not a version; write one such as 1.16.0")
    parts = [int(part) for part in match[1].split(".")]
    return (*parts, *[0] * (3 - len(parts)))


def is_version(text: str) -> bool:
    """Tell a release or a commit from the name of a branch.

    >>> is_version("1.17.0.dev0"), is_version("abc1234"), is_version("main")
    (True, True, False)
    """
    try:
        parse_version(text)
    except UsageError:
        return _COMMIT.search(text) is not None
    return True


@dataclass(frozen=True)
class ReadCode:
    """Code of a trainer that was read: releases one after another, or a commit.

    Attributes:
        first: the first release, or the number by which options say what a commit has.
        last: the last release; empty: the first.
        commit: the commit that was read, where that is known; of several releases that of the last.
        main_of: the day of a commit of the main branch that no release has; empty for releases.
        tag: the development version that is a tag of that commit; empty without one.
    """

    first: str
    last: str = ""
    commit: str = ""
    main_of: str = ""
    tag: str = ""

    @property
    def name(self) -> str:
        """What `--trainer NAME@` takes for the newest code of these.

        >>> ReadCode("0.3.0", "0.8.0").name, ReadCode("0.8.1", commit="559b44772", main_of="2026-08-21").name
        ('0.8.0', '559b447')
        """
        return self.commit[:_SHORT] if self.main_of else self.last or self.first

    def __str__(self) -> str:
        if self.main_of:
            return f"main of {self.main_of} ({self.commit[:_SHORT]})"
        span = f"{self.first} to {self.last}" if self.last else self.first
        return f"{span} ({self.commit[:_SHORT]})" if self.commit else span


@dataclass(frozen=True)
class Release:
    """A release as a run or the user names it.

    Attributes:
        numbers: by which options say what it has; of code that was not read those of the nearest that was.
        state: whether its code was read.
        words: why nothing follows from differences of numbers; empty where it was read.
    """

    numbers: tuple[int, ...]
    state: ReleaseState
    words: str = ""


def release_of(text: str, read: Sequence[ReadCode], title: str) -> Release:
    """Look up a release, by its numbers or its commit, among the code that was read.

    Args:
        text: the release, such as ``1.16.0``, ``0.8.1.dev67+g559b447`` or ``559b447``.
        read: what was read of the trainer, oldest first.
        title: how sentences call the trainer.

    Raises:
        UsageError: if the text is neither a version nor a commit.

    >>> read = (ReadCode("0.3.0", "0.8.0"), ReadCode("0.8.1", commit="559b44772", main_of="2026-08-21"))
    >>> [release_of(text, read, "prime-rl").state for text in ("0.5.1", "559b447", "0.8.1", "0.2.0")]
    ['read', 'read', 'not read', 'older']
    >>> tagged = (ReadCode("0.8.1", commit="559b44772", main_of="2026-08-21", tag="0.8.1.dev67"),)
    >>> [release_of(text, tagged, "prime-rl").state for text in ("v0.8.1.dev67", "0.8.1.dev6", "0.8.1.dev68")]
    ['read', 'not read', 'not read']
    >>> release_of("0.9.0", read, "prime-rl").words
    'prime-rl 0.9.0 is newer than main of 2026-08-21 (559b447), the last that was read: differences of numbers prove nothing'
    """  # noqa: E501  # a sentence that users see
    nothing = "differences of numbers prove nothing"
    if text.lower().removeprefix("v").partition("+")[0] in {code.tag for code in read if code.tag}:
        return Release(parse_version(text), READ)
    commit = _COMMIT.search(text.lower())
    if commit is not None:
        for code in read:
            if code.commit and (code.commit.startswith(commit[1]) or commit[1].startswith(code.commit)):
                return Release(parse_version(code.last or code.first), READ)
        if not re.match(r"v?[0-9]+\.", text):
            last = parse_version(read[-1].last or read[-1].first)
            return Release(last, "not read", f"{title} {text} is a commit that was not read: {nothing}")
    numbers = parse_version(text)
    oldest, newest = parse_version(read[0].first), parse_version(read[-1].last or read[-1].first)
    if numbers < oldest:
        words = f"{title} {text} is older than {read[0].first}, the first that was read: {nothing}"
        return Release(oldest, "older", words)
    # A number that main had before its release is not yet that release.
    if numbers > newest or (numbers == newest and read[-1].main_of):
        words = f"{title} {text} is newer than {_last(read)}, the last that was read: {nothing}"
        return Release(numbers, "not read", words)
    return Release(numbers, READ)


def _last(read: Sequence[ReadCode]) -> str:
    code = read[-1]
    return str(code) if code.main_of else code.last or code.first
