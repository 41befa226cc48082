"""The page of `view` as one document with its data in it: to be shared, without a server."""

from collections.abc import Mapping
from importlib import resources

import orjson

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded from anywhere; what is in the document runs."""


def asset(name: str) -> bytes:
    """Return a file of the page."""
    return resources.files("rolloutdoctor.views").joinpath("viewer", name).read_bytes()


def viewer_document(data: Mapping[str, object]) -> str:
    """Return the page as one HTML document.

    Args:
        data: question of the page, such as ``step?step=46&split=train``, to its answer.
    """
    page = asset("index.html").decode()
    for name in ("uPlot.min.css", "viewer.css"):
        page = page.replace(f'<link rel="stylesheet" href="{name}">', f"<style>{asset(name).decode()}</style>")
    for name in ("uPlot.iife.min.js", "viewer.js"):
        page = page.replace(f'<script src="{name}"></script>', f"<script>{asset(name).decode()}</script>")
    # No text of the run can end the element that holds it.
    body = orjson.dumps(data).decode().replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    held = f'<script type="application/json" id="rolloutdoctor-data">{body}</script>'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}').replace(
        "<main", f"{held}\n<main"
    )
