r"""Escaping of text of any origin on output: control characters shown, never sent; quotations cut; JSON pure.

Text is kept as it came until it leaves: what is shown escaped is still what the file holds. Escaped are the C0 and C1
controls with DEL, marks and overrides of the writing direction, the separators of lines and paragraphs, and
surrogates without a partner, which no encoding can write.
"""

import json
import math
import re

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HIDDEN = f"\x7f-\x9f\u2028\u2029{_BIDI}\ud800-\udfff"
_CONTROL = re.compile(f"[\x00-\x1f{_HIDDEN}]")
_CONTROL_IN_LINES = re.compile(f"[\x00-\x09\x0b-\x1f{_HIDDEN}]")
_COLOR_OR_CONTROL = re.compile(rf"(\x1b\[[0-9;]*m)|{_CONTROL_IN_LINES.pattern}")
_NOT_IN_JSON = re.compile(f"[{_HIDDEN}]")
_COMMAND = re.compile(r"^(\s*)::(?!(?:error|warning|notice) title=)", re.MULTILINE)
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

LONGEST_QUOTE = 200
"""Characters of one word in a message: a value that is quoted is rarely longer, and never needs to be."""

_LONGEST_MESSAGE = 1200
_HEAD = 700
_LONG_WORD = re.compile(rf"\S{{{LONGEST_QUOTE + 1},}}")


def visible(text: str) -> str:
    r"""Text on one line, with every control character shown escaped.

    >>> print(visible("a\x1b[31mred\nb\u202e"))
    a\x1b[31mred\nb\u202e
    """
    return _CONTROL.sub(_shown, text)


def visible_lines(text: str, *, colored: bool = False) -> str:
    r"""The same of lines, which stay lines.

    Args:
        text: of any length.
        colored: True to let sequences for colours pass; all that is not our own was escaped before they were added.

    >>> print(visible_lines("a\x07\nb"))
    a\x07
    b
    """
    if colored:
        return _COLOR_OR_CONTROL.sub(lambda match: match[1] or _shown(match), text)
    return _CONTROL_IN_LINES.sub(_shown, text)


def without_commands(text: str) -> str:
    """Text in which the runner of a GitHub job finds no command: `::` after spaces at a line's start, `##[` anywhere.

    Annotations, which are commands of our own, stay.

    >>> without_commands("  ::stop-commands::t")
    '  : :stop-commands::t'
    """
    return _COMMAND.sub(r"\1: :", text).replace("##[", "# #[")


def cut(text: str, limit: int = LONGEST_QUOTE) -> str:
    """Return the beginning of a long text, and how much was cut.

    >>> cut("a" * 30, 8)
    'aaaaaaaa...(22 more characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}...({len(text) - limit:,} more characters)"


def sentence(text: str) -> str:
    """A message on one line: nothing in it is hidden, and what it quotes is cut.

    A message says first where something is wrong and last what to do; what it quotes stands between them.
    """
    words = _LONG_WORD.sub(lambda match: cut(match[0]), text)
    if len(words) > _LONGEST_MESSAGE:
        tail = _LONGEST_MESSAGE - _HEAD
        left_out = len(words) - _LONGEST_MESSAGE
        words = f"{words[:_HEAD]}...({left_out:,} more characters)...{words[-tail:]}"
    return visible(words)


def json_text(value: object, *, indent: int | None = None, ascii_only: bool = False) -> str:
    r"""Write a value as JSON that any terminal may show, and that reads back as the same value.

    What no JSON has a word for (NaN, infinity) is null; a character that a terminal would hide or obey is ``\uXXXX``.

    Args:
        value: of plain Python types.
        indent: of nested lines; None: all on one line.
        ascii_only: True to escape whatever is not ASCII.

    >>> print(json_text({"name": "\x9b31m\u202e\ud800", "value": float("nan")}))
    {"name": "\u009b31m\u202e\ud800", "value": null}
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    except ValueError:
        cleaned = _without_nan(value)
        text = json.dumps(cleaned, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    # Outside of its strings JSON has none of these; the last two are what a job's log takes for a command.
    text = text.replace("##[", "#\\u0023[")
    return _NOT_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return value


def _shown(match: re.Match[str]) -> str:
    letter = match[0]
    return _NAMED.get(letter) or (f"\\x{ord(letter):02x}" if ord(letter) < 0x100 else f"\\u{ord(letter):04x}")
