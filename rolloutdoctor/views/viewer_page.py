"""The page of `view` as one document with its data in it: to be shared, without a server."""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib import resources

import orjson

_SCRIPTS = ("uPlot.iife.min.js", "viewer.js")


def policy(*, with_viewer: bool) -> str:
    """Return the content security policy of a page in one file: nothing is loaded, and no text of a run is a script.

    Args:
        with_viewer: True to let the two scripts of the viewer run, known by their digests.
    """
    digests = (b64encode(sha256(asset(name)).digest()).decode() for name in _SCRIPTS)
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests) if with_viewer else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


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
    for name in _SCRIPTS:
        page = page.replace(f'<script src="{name}"></script>', f"<script>{asset(name).decode()}</script>")
    # No text of the run can end the element that holds it.
    body = orjson.dumps(data).decode().replace("<", "\\u003c")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy(with_viewer=True)}">'
    held = f'<script type="application/json" id="rolloutdoctor-data">{body}</script>'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}').replace("<main", f"{held}\n<main")
