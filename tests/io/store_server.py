"""A web server and object store on loopback, in the standard library: ranges of bytes, and the part of S3 that reads.

Checked against moto's server when it was written: the same tests pass against both.
"""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@contextmanager
def serving(folder, **options):
    """Serve a folder; gives the server, whose `requests` are the paths that were asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.folder, server.requests = Path(folder), []
    server.ranges, server.login, server.broken_after = True, False, None
    for name, value in options.items():
        setattr(server, name, value)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._serve(with_body=False)

    def do_GET(self):
        self._serve(with_body=True)

    def _serve(self, *, with_body):
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        path = self.server.folder / unquote(address.path).strip("/")
        self.server.requests.append((self.command, address.path, self.headers.get("Range")))
        if self.server.login and "Authorization" not in self.headers:
            self._answer(403, _error("AccessDenied"), with_body)
        elif "list-type" in query or "prefix" in query:
            self._answer(200, self._listed(path, query), with_body)
        elif self.command == "HEAD" and path.is_dir() and path.parent == self.server.folder:
            self._answer(200, b"", with_body)
        elif not path.is_file():
            self._answer(404, _error("NoSuchKey"), with_body)
        else:
            self._file(path.read_bytes(), with_body)

    def _file(self, body, with_body):
        span = self.headers.get("Range")
        headers = {"ETag": '"0"', "Last-Modified": "Sat, 01 Aug 2026 00:00:00 GMT"}
        if span is None or not self.server.ranges:
            self._answer(200, body, with_body, headers)
            return
        start, _, stop = span.removeprefix("bytes=").partition("-")
        part = body[int(start) : int(stop) + 1 if stop else None]
        if not part:
            self._answer(416, b"", with_body)
            return
        headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}"
        self._answer(206, part, with_body, headers)

    def _listed(self, bucket, query):
        prefix = query.get("prefix", "")
        keys = sorted(path.relative_to(bucket).as_posix() for path in bucket.rglob("*") if path.is_file())
        keys = [key for key in keys if key.startswith(prefix)]
        folders = {}
        if query.get("delimiter"):
            folders = {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]}
            keys = [key for key in keys if "/" not in key[len(prefix) :]]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-08-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{(bucket / key).stat().st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in keys
        )
        commons = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        return (
            f"{XML}<ListBucketResult {NAMESPACE}><Name>{bucket.name}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(keys) + len(folders)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{contents}{commons}</ListBucketResult>"
        ).encode()

    def _answer(self, status, body, with_body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _error(code):
    return f"{XML}<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
