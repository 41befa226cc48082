"""Sources of bytes: files of this machine, and object stores and web servers by their addresses.

``s3://`` and ``gs://`` go through pyarrow's file systems, ``hf://`` through that of huggingface_hub, and ``http(s)://``
through requests for ranges of bytes. Credentials are found as these libraries find them: in the environment and in
the files of the vendors' own tools. What is written stays on this machine.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
from pyarrow import fs

from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_WEB = ("http", "https")
_SECONDS = 20.0
_DENIED = re.compile(
    r"ACCESS_DENIED|\b40[13]\b|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|PermissionDenied|credentials", re.I
)
_HELP = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run 'gcloud auth application-default login' or set GOOGLE_APPLICATION_CREDENTIALS, "
    "or write gs://anonymous@BUCKET for a public one",
    "hf": "set HF_TOKEN, or run 'hf auth login'",
}


class Address(NamedTuple):
    """A remote path.

    Attributes:
        scheme: ``s3``, ``gs``, ``hf``, ``http`` or ``https``.
        path: bucket and key, as the file system takes them; of the web the whole address without its query.
        query: what follows the question mark, with it, or nothing.
    """

    scheme: str
    path: str
    query: str

    @property
    def name(self) -> str:
        """Return the name for messages: without a query or a user, which may hold secrets."""
        shown = self.path.removeprefix(f"{self.scheme}://")
        place, slash, rest = shown.partition("/")
        return f"{self.scheme}://{place.rpartition('@')[2]}{slash}{rest}"

    def with_path(self, path: str) -> str:
        """The address of another path in the same store."""
        return f"{self.scheme}://{path.removeprefix(f'{self.scheme}://')}{self.query}"


def address_of(path: str) -> Address | None:
    """Return the parts of a remote path; None for a path of this machine.

    >>> address_of("s3://bucket/run.parquet?region=eu-west-1")
    Address(scheme='s3', path='bucket/run.parquet', query='?region=eu-west-1')
    >>> address_of("runs/run.parquet")

    Raises:
        UsageError: if the kind of address is not known.
    """
    match = _ADDRESS.match(path)
    if match is None:
        return None
    scheme = {"gcs": "gs"}.get(match[1].lower(), match[1].lower())
    if scheme not in ("s3", "gs", "hf", *_WEB):
        raise UsageError(f"{path}: no files are read from {scheme}:// (known: s3://, gs://, hf://, https://, http://)")
    rest, mark, query = path[match.end() :].partition("?")
    if not rest.strip("/"):
        raise UsageError(f"{path}: names no file; write {scheme}://PLACE/NAME.parquet")
    return Address(scheme, f"{scheme}://{rest}" if scheme in _WEB else rest.rstrip("/"), mark + query)


def open_bytes(path: str) -> pa.NativeFile:
    """Open a file of any place for reading at any position.

    Raises:
        OSError: if a file of this machine cannot be opened.
        InputError: if a remote one cannot.
    """
    address = address_of(path)
    if address is None:
        # Bytes, because arrow refuses names that are not UTF-8.
        return pa.OSFile(os.fsencode(path))
    with _explaining_errors(address):
        if address.scheme in _WEB:
            from rolloutdoctor.io.locations.web import WebFile

            return pa.PythonFile(WebFile(address.path + address.query, _SECONDS), mode="r")
        return _store(address.scheme, address.query, _account(address)).open_input_file(_key(address))


def size_of(path: str) -> int:
    """Bytes of a file of any place.

    Raises:
        OSError: if a file of this machine cannot be looked at.
        InputError: if a remote one cannot.
    """
    with open_bytes(path) as file:
        return int(file.size())


def listing(address: Address) -> list[str] | None:
    """Paths of the files in a remote folder; None if the address is a file.

    Raises:
        InputError: if there is nothing at the address, or it cannot be reached.
    """
    if address.scheme in _WEB:
        return None

    with _explaining_errors(address):
        store = _store(address.scheme, address.query, _account(address))
        info = store.get_file_info(_key(address))
        if info.type == fs.FileType.File:
            return None
        entries = store.get_file_info(fs.FileSelector(_key(address), allow_not_found=True))
        if info.type == fs.FileType.NotFound and not entries:
            raise FileNotFoundError(address.path)
        account = _account(address)
        return [
            f"{account}@{entry.path}" if account else entry.path for entry in entries if entry.type == fs.FileType.File
        ]


def is_there(path: str) -> bool:
    """Tell whether a remote file is there and can be read."""
    try:
        open_bytes(path).close()
    except InputError:
        return False
    return True


def _account(address: Address) -> str:
    """Return what stands before an ``@`` in the name of a bucket; the path of hf:// has another use for it."""
    return "" if address.scheme == "hf" else address.path.partition("/")[0].rpartition("@")[0]


def _key(address: Address) -> str:
    account = _account(address)
    return address.path[len(account) + 1 :] if account else address.path


class _NoCredentialsError(Exception):
    """There is nothing to log in with."""


@lru_cache(maxsize=8)
def _store(scheme: str, query: str, account: str) -> fs.FileSystem:
    """The file system of a scheme; options in the query go over the environment, as in pyarrow's own addresses."""
    parameters = {name: values[-1] for name, values in parse_qs(query.removeprefix("?")).items()}
    if scheme == "s3":
        endpoint = parameters.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3")
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL")
        region = parameters.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        url = urlsplit(endpoint) if endpoint and "://" in endpoint else None
        return fs.S3FileSystem(
            region=region or ("us-east-1" if endpoint else None),
            endpoint_override=url.netloc if url else endpoint,
            scheme=url.scheme if url else parameters.get("scheme", "https"),
            connect_timeout=_SECONDS,
            request_timeout=3 * _SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3),
        )
    if scheme == "gs":
        from datetime import timedelta

        from rolloutdoctor.io.locations.google import has_credentials

        emulator = urlsplit(os.environ.get("STORAGE_EMULATOR_HOST", ""))
        endpoint = parameters.get("endpoint_override") or emulator.netloc or None
        if account != "anonymous" and endpoint is None and not has_credentials():
            raise _NoCredentialsError
        return fs.GcsFileSystem(
            anonymous=account == "anonymous",
            endpoint_override=endpoint,
            scheme=parameters.get("scheme") or emulator.scheme or "https",
            retry_time_limit=timedelta(seconds=_SECONDS),
        )
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise UsageError("hf:// needs huggingface_hub; install rolloutdoctor[remote], or download the files") from None
    return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))


@contextmanager
def _explaining_errors(address: Address) -> Iterator[None]:
    """Turn what the libraries raise into one sentence."""
    try:
        yield
    except RolloutDoctorError:
        raise
    except _NoCredentialsError:
        raise InputError(f"{address.name}: no credentials were found; {_HELP[address.scheme]}") from None
    except FileNotFoundError:
        raise InputError(f"{address.name}: no such file; check the address") from None
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, PermissionError) or _DENIED.search(words):
            remedy = _HELP.get(address.scheme, "give an address that needs no login")
            raise InputError(f"{address.name}: access denied; {remedy}") from None
        if not isinstance(error, (OSError, pa.ArrowException)) and address.scheme != "hf":
            raise
        words = words if len(words) <= 160 else words[:157] + "..."
        raise InputError(
            f"{address.name}: cannot be reached ({words}); check the address and the connection, or copy the file here"
        ) from None
