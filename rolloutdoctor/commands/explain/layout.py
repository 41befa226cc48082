"""Lines of the pages: filled to the width of the terminal, or cut to one line."""

import json
import shutil
import textwrap


def width() -> int:
    """Width of the terminal, between 60 and 100."""
    return max(60, min(100, shutil.get_terminal_size((100, 24)).columns))


def hanging(first: str, text: str, spaces: int = 31) -> str:
    """Lines of which the first begins with a word and the others with spaces."""
    return textwrap.fill(
        text,
        width(),
        initial_indent=first,
        subsequent_indent=" " * spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


def indented(text: str, spaces: int) -> str:
    """Lines that all begin with spaces."""
    return hanging(" " * spaces, text, spaces)


def one_line(first: str, text: str) -> str:
    """A line, cut at a word where it is longer than the terminal is wide."""
    columns = max(width() - len(first), 12)
    return (first + textwrap.shorten(text, columns, placeholder=" ...")).rstrip()


def titled(title: str, text: str) -> str:
    """A paragraph with its title at the left margin."""
    return hanging(f"{title:<12}", text, 12)


def word(value: object) -> str:
    """A value of an option as configuration files write it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
