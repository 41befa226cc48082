"""What is done with a command line before its options are parsed: pages that need no parser, and old names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rolloutdoctor import packs
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.results.version import __version__

_VERBOSE = {"-v", "--verbose"}


def page_for(words: Sequence[str]) -> Callable[[], str] | None:
    """Return what makes the page that the words of a command line ask for; None where there is an option to parse.

    The option parser takes longer to import than any page to print.
    """
    if list(words) == ["--version"]:
        return version
    plain = [word for word in words if word not in _VERBOSE]
    if plain[:1] != [packs.BOOK] or any(word.startswith("-") for word in plain):
        return None
    return partial(_explained, plain[1:], verbose=len(plain) < len(words))


def _explained(words: Sequence[str], *, verbose: bool) -> str:
    from rolloutdoctor.plugins import own

    (explained,) = own([packs.PAGES])
    page: Any = explained(words, verbose=verbose)
    return str(page)


def version() -> str:
    """The program's name and version."""
    return f"rolloutdoctor {__version__}"


def renamed(words: Sequence[str]) -> list[str]:
    """Return a command line under the names of today, and say on stderr which one took the place of an old one."""
    now = packs.RENAMED.get(words[0]) if words else None
    if now is None:
        return list(words)
    say(f"{words[0]} is now `rolloutdoctor {' '.join(now)}`, and the old name goes with the next release")
    return [*now, *words[1:]]
