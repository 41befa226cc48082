"""A web server and object stores on loopback, in the standard library: ranges of bytes, and the parts that read of S3,
of Google's JSON interface and of the Hugging Face Hub's.
"""

import json
import threading
from contextlib import contextmanager, suppress
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
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer is a head and a body: held back until the head is acknowledged, the body comes 40 ms late.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._serve(with_body=False)

    def do_GET(self):
        self._serve(with_body=True)

    def do_POST(self):
        self._serve(with_body=True)

    def _serve(self, *, with_body):
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        path = self.server.folder / unquote(address.path).strip("/")
        self.server.requests.append((self.command, address.path, self.headers.get("Range")))
        if self.server.login and "Authorization" not in self.headers:
            self._answer(403, _error("AccessDenied"), with_body)
        elif address.path.startswith("/storage/v1/b/"):
            self._google(*unquote(address.path.removeprefix("/storage/v1/b/")).split("/", 2), query=query)
        elif address.path.startswith("/api/"):
            self._hub(address.path.split("/")[5:])
        elif address.path.startswith("/datasets/owner/"):
            self._file((self.server.folder / unquote(address.path).split("/", 6)[6]).read_bytes(), with_body)
        elif "list-type" in query or "prefix" in query:
            self._answer(200, self._listed(path, query), with_body)
        elif self.command == "HEAD" and path.is_dir() and path.parent == self.server.folder:
            self._answer(200, b"", with_body)
        elif not path.is_file():
            self._answer(404, _error("NoSuchKey"), with_body)
        else:
            self._file(path.read_bytes(), with_body)

    def _google(self, bucket, _, key="", *, query):
        folder = self.server.folder / bucket

        def said(path):
            name = path.relative_to(folder).as_posix()
            when = "2026-08-01T00:00:00.000Z"
            return {"kind": "storage#object", "name": name, "bucket": bucket, "generation": "1", "updated": when} | {
                "size": str(path.stat().st_size)
            }

        if not key:
            prefix = query.get("prefix", "")
            found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            found = [path for path in found if path.relative_to(folder).as_posix().startswith(prefix)]
            if query.get("delimiter"):
                found = [path for path in found if "/" not in path.relative_to(folder).as_posix()[len(prefix) :]]
            self._json({"kind": "storage#objects", "items": [said(path) for path in found]})
        elif not (folder / key).is_file():
            self._json({"error": {"code": 404, "message": "no"}}, 404)
        elif query.get("alt") == "media":
            self._file((folder / key).read_bytes(), with_body=True)
        else:
            self._json(said(folder / key))

    def _hub(self, parts):
        """What the hub answers on the one repository there is, `owner/repo`."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def said(path):
            name = path.relative_to(self.server.folder).as_posix()
            if path.is_dir():
                return {"type": "directory", "path": name, "oid": "0"}
            return {"type": "file", "path": name, "oid": "0", "size": path.stat().st_size}

        if not parts or parts[0] == "revision":
            self._json({"id": "owner/repo", "sha": "0", "_id": "0", "tags": [], "siblings": []})
        elif parts[0] == "paths-info":
            asked = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
            paths = [self.server.folder / name for name in asked["paths"]]
            self._json([said(path) for path in paths if path.exists()])
        else:
            folder = self.server.folder / unquote("/".join(parts[2:]))
            if not folder.is_dir():
                self._json({"error": "no"}, 404)
                return
            self._json([said(path) for path in sorted(folder.iterdir())])

    def _json(self, body, status=200):
        self._answer(status, json.dumps(body).encode(), True, {"Content-Type": "application/json"})

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
            # Who has read enough of a file hangs up.
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)


def _error(code):
    return f"{XML}<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
