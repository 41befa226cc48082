"""The local server of `view`: on 127.0.0.1 alone, read-only, and only for who knows the token in its address."""

import secrets
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from rolloutdoctor.views.viewer_page import asset

HOST = "127.0.0.1"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: nothing is loaded from anywhere else, and no text of the run can become a script."""

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "viewer.js": ("viewer.js", "text/javascript; charset=utf-8"),
    "viewer.css": ("viewer.css", "text/css; charset=utf-8"),
    "uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}


class Answer(NamedTuple):
    """Body of an answer, JSON, and its status."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK


Api = Mapping[str, Callable[[Mapping[str, str]], Answer]]
"""Name of a question to what answers it, given the parameters of the address."""


class PageServer(ThreadingHTTPServer):
    """Serves the page and answers its questions.

    Attributes:
        address: of the page; nobody who does not have it gets anything.
    """

    daemon_threads = True

    def __init__(self, port: int, api: Api) -> None:
        super().__init__((HOST, port), _Handler)
        self.api = api
        self.prefix = f"/{secrets.token_urlsafe(24)}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.address = f"http://{HOST}:{self.server_port}{self.prefix}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a browser that left before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "rolloutdoctor", ""

    def do_GET(self) -> None:
        """Answer with a file of the page, or with what a question of it gives."""
        path, query = urlsplit(self.path).path, urlsplit(self.path).query
        # The name of another host means that a page from elsewhere was made to point here.
        is_known = self.headers.get("Host") in self.server.hosts
        prefix = self.server.prefix
        if not is_known or not secrets.compare_digest(path[: len(prefix)].encode(), prefix.encode()):
            self._send(Answer(b"", HTTPStatus.NOT_FOUND), "text/plain")
            return
        name = path[len(prefix) :]
        if name in _FILES:
            file, kind = _FILES[name]
            self._send(Answer(asset(file)), kind)
        elif name.startswith("api/") and name[4:] in self.server.api:
            parameters = {key: values[-1] for key, values in parse_qs(query).items()}
            self._send(self.server.api[name[4:]](parameters), "application/json")
        else:
            self._send(Answer(b"", HTTPStatus.NOT_FOUND), "text/plain")

    def _send(self, answer: Answer, kind: str) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is the user's."""
