"""What can be explained, by kind, and what a name means."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol

from rolloutdoctor.commands.explain import causes, columns, fixes, metrics, options, rules, schemas, terms, trainers
from rolloutdoctor.commands.explain.layout import hanging, one_line
from rolloutdoctor.results.errors import UsageError

MOST = 40
"""Lines of a group in the list of everything: a screen."""

NEAREST = 3
"""Names that a message gives for one that is not there."""

_CODE = re.compile(r"RD[A-Z]?\d{0,3}", re.IGNORECASE)


class Kind(Protocol):
    """A kind of names: a module of this package."""

    def lines(self) -> Mapping[str, str]:
        """Return the names that a list gives, each to a line on it."""

    def is_known(self, name: str) -> bool:
        """Tell whether a name is of this kind."""

    def page(self, name: str, *, verbose: bool = False) -> str:
        """Explain one of them."""

    def body(self, name: str) -> object:
        """Return one of them for programs."""

    def listing(self, *, verbose: bool = False) -> str:
        """List them all."""

    def bodies(self) -> object:
        """Return them all for programs."""


KINDS: Mapping[str, Kind] = {
    "rules": rules,
    "fixes": fixes,
    "trainers": trainers,
    "metrics": metrics,
    "columns": columns,
    "terms": terms,
    "options": options,
    "causes": causes,
}
"""Word for all of a kind to it, those that take long to import last."""

SCHEMAS = "schemas"
"""Outputs have the names of commands, so that they are explained by this word alone."""

_ONE = {
    "rule": "rules",
    "fix": "fixes",
    "trainer": "trainers",
    "metric": "metrics",
    "column": "columns",
    "term": "terms",
    "option": "options",
    "cause": "causes",
    "schema": SCHEMAS,
}
"""Word for one of a kind to that for all of them."""

_HEADS = {
    "fixes": "Fixes: named changes of what a trainer computes, for `diff --fix NAME`",
    "trainers": "Trainers",
    "metrics": "Metrics: quantities; the names of logs are explained, too",
    "columns": "Columns of a run file",
    "terms": "Terms",
}


def explained(words: Sequence[str], *, verbose: bool = False) -> str:
    """Explain what the words of a command line name; without one list everything.

    Raises:
        UsageError: if nothing has that name, or several have such a beginning.
    """
    kind, name = _split(words)
    if kind is None:
        return "\n\n".join(doc.page(each, verbose=verbose) for doc, each in _found(name)) if name else everything()
    if kind == SCHEMAS:
        return schemas.listing(name or None)
    doc = KINDS[kind]
    if not name:
        return doc.listing(verbose=verbose)
    if not doc.is_known(name) and kind in _PARTS:
        return _PARTS[kind].listing_of(name)
    return doc.page(_of_kind(kind, name), verbose=verbose)


def bodies(words: Sequence[str]) -> object:
    """Return the same for programs: an object for one name, a list for several.

    Raises:
        UsageError: likewise.
    """
    kind, name = _split(words)
    if kind is None:
        if not name:
            return [{"kind": each, "name": line, "words": words} for each, line, words in _entries()]
        pages = [doc.body(each) for doc, each in _found(name)]
        return pages[0] if len(pages) == 1 else pages
    if kind == SCHEMAS:
        raise UsageError("a schema is JSON already: leave --format out")
    doc = KINDS[kind]
    if not name:
        return doc.bodies()
    if not doc.is_known(name) and kind in _PARTS:
        return _PARTS[kind].bodies_of(name)
    found_one = doc.body(_of_kind(kind, name))
    return [found_one] if kind == words[0] == "trainers" else found_one


class _Parts(Protocol):
    def listing_of(self, name: str) -> str: ...

    def bodies_of(self, name: str) -> object: ...


_PARTS: Mapping[str, _Parts] = {"causes": causes, "metrics": metrics}
"""Kinds of which those of a rule, or of a trainer, are a list of their own."""


def _split(words: Sequence[str]) -> tuple[str | None, str]:
    """Return the kind that the first word is, None where it is a name, and the name."""
    first = words[0].lower() if words else ""
    kind = _ONE.get(first, first)
    return (kind, " ".join(words[1:])) if kind in KINDS or kind == SCHEMAS else (None, " ".join(words))


def _of_kind(kind: str, name: str) -> str:
    """Return a name of one kind, which may be begun alone.

    Raises:
        UsageError: if there is none.
    """
    doc = KINDS[kind]
    if doc.is_known(name):
        return name
    return _begun(name, doc.lines()) or _fail(name, list(doc.lines()), f"no {_word(kind)} {name!r}", f"explain {kind}")


def _word(kind: str) -> str:
    return next(singular for singular, every in _ONE.items() if every == kind)


def _found(name: str) -> list[tuple[Kind, str]]:
    """Return what has a name, of every kind; else the rules whose codes begin so, or the one whose name does.

    Raises:
        UsageError: if there is nothing, or several names begin so.
    """
    if _CODE.fullmatch(name):
        codes = [code for code in rules.codes() if code.startswith(name.upper())]
        return [(rules, codes[0])] if len(codes) == 1 else [(rules, name.upper())] if codes else _none(name)
    light = {kind: doc for kind, doc in KINDS.items() if kind != "causes"}
    if entries := [(doc, name) for doc in light.values() if doc.is_known(name)]:
        return entries
    if causes.is_known(name):
        return [(causes, name)]
    for begins, names in ((rules, rules.names()), (fixes, fixes.names()), (causes, list(causes.lines()))):
        if begun := _begun(name, names):
            return [(begins, begun)]
    return _none(name)


def _none(name: str) -> "list[tuple[Kind, str]]":
    names = [*rules.names(), *metrics.names(), *options.lines(), *terms.words()]
    names += [each for kind in ("fixes", "trainers", "columns", "causes") for each in KINDS[kind].lines()]
    _fail(name, names, f"nothing is called {name!r}", "explain")
    return []


def _begun(name: str, names: "Iterator[str] | Mapping[str, str] | Sequence[str]") -> str | None:
    """Return the only name that begins so; None where none does.

    Raises:
        UsageError: if several do.
    """
    matches = [each for each in names if each.startswith(name.lower())]
    if len(matches) > 1:
        more = f" and {len(matches) - NEAREST} more" if len(matches) > NEAREST else ""
        raise UsageError(f"{name!r} is the beginning of {', '.join(matches[:NEAREST])}{more}; write more of one")
    return matches[0] if matches else None


def _fail(name: str, names: Sequence[str], message: str, listing: str) -> str:
    """Refuse a name, with the nearest ones.

    Raises:
        UsageError: always.
    """
    by_lower = {each.lower(): each for each in reversed(names)}
    close = [by_lower[each] for each in get_close_matches(name.lower(), by_lower, n=NEAREST, cutoff=0.6)]
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise UsageError(f"{message}{meant} (`rolloutdoctor {listing}` lists what there is)")


def everything() -> str:
    """List everything, a line each, by kind, and no more of a kind than a screen."""
    listed = [hanging("", _FIRST, 0)]
    for head, all_of, lines in _groups():
        width = max(map(len, lines)) + 2
        listed += ["", head]
        listed += [one_line(f"  {name:<{width}}", words) for name, words in list(lines.items())[:MOST]]
        if len(lines) > MOST:
            listed.append(f"  and {len(lines) - MOST} more: `rolloutdoctor explain {all_of}`")
    return "\n".join([*listed, "", hanging("", _LAST, 0)])


_FIRST = "`rolloutdoctor explain NAME` explains one of these; a rule, fix or cause by the beginning of its name, too."
_LAST = (
    "`rolloutdoctor explain causes` lists what a trainer may have done otherwise than its options say, and "
    "`rolloutdoctor explain schemas` the outputs for programs. An option of a trainer and a name in its log are "
    "explained by that name."
)


def _groups() -> Iterator[tuple[str, str, Mapping[str, str]]]:
    for family, lines in rules.by_family().items():
        yield f"Rules {family}", "rules", lines
    for kind, head in _HEADS.items():
        yield head, kind, KINDS[kind].lines()


def _entries() -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and line of everything."""
    for kind in ("rules", *_HEADS):
        for name, words in KINDS[kind].lines().items():
            yield _word(kind), name.partition(" ")[0] if kind == "rules" else name, words
