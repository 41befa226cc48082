"""Display of results in a notebook: views register a renderer for each kind of result."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_views: dict[type, Callable[[Any], str]] = {}
_texts: dict[type, Callable[[Any], str]] = {}


def show_as(kind: type[T], view: Callable[[T], str]) -> None:
    """Show results of a kind as the HTML that a view makes of them."""
    _views[kind] = view


def print_as(kind: type[T], view: Callable[[T], str]) -> None:
    """Print results of a kind as the text that a view makes of them."""
    _texts[kind] = view


class Displayed:
    """Base of results that a notebook shows as HTML."""

    def __str__(self) -> str:
        """Return the text that `print` shows; where no view is at hand, that of `repr`."""
        view = _texts.get(type(self))
        return repr(self) if view is None else view(self)

    def _repr_html_(self) -> str | None:
        """Return the page that Jupyter asks for; None where no view is at hand, and the text is shown."""
        view = _views.get(type(self))
        return None if view is None else view(self)
