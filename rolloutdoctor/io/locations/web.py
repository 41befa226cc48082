"""A file on a web server, read by ranges of bytes."""

import http.client
import io
import urllib.error
import urllib.request
from typing import Any


class WebFile(io.RawIOBase):
    """A file behind an ``http(s)://`` address, of which only the bytes that are asked for are fetched.

    Args:
        address: of the file, query included.
        seconds: how long to wait for the server.

    Raises:
        OSError: if the server cannot be reached, refuses, or does not give ranges; FileNotFoundError and
            PermissionError where that is what it says.
    """

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__()
        self._address, self._seconds, self._at = address, seconds, 0
        self._size = self._look()

    def _fetch(self, start: int, stop: int) -> "http.client.HTTPResponse":
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self._address, headers=wanted)
        try:
            opened: Any = urllib.request.urlopen(request, timeout=self._seconds)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise FileNotFoundError(self._address) from None
            if error.code in (401, 403):
                raise PermissionError(f"the server answers {error.code} {error.reason}") from None
            raise OSError(f"the server answers {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise OSError(f"no connection: {error.reason}") from None
        except http.client.HTTPException as error:
            raise OSError(f"no answer in HTTP: {type(error).__name__}") from None
        response: http.client.HTTPResponse = opened
        return response

    def _look(self) -> int:
        try:
            with self._fetch(0, 1) as response:
                span = response.headers.get("Content-Range", "")
                if response.status == 206 and span.rpartition("/")[2].isdigit():
                    return int(span.rpartition("/")[2])
        except OSError as error:
            # The only range that an empty file has not is its first byte.
            if "answers 416" in str(error):
                return 0
            raise
        raise OSError("the server does not give ranges of bytes, so download the file")

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that it can be read at any position."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def size(self) -> int:
        """Return the number of bytes."""
        return self._size

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  # any buffer
        """Fetch the bytes at the position into a buffer."""
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._size)
        if stop <= self._at:
            return 0
        done = 0
        with self._fetch(self._at, stop) as response:
            while done < stop - self._at:
                count = response.readinto(view[done : stop - self._at])
                if not count:
                    raise OSError("the server ended its answer too early")
                done += count
        self._at += done
        return done
