"""Files of `torch.save`, loaded without running code and without trusting the sizes that they declare."""

import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rolloutdoctor.importers.reading.pickles import check_pickle
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

_MOST_RECORDS = 2_000_000

_NAME_LENGTHS_AT = 26
"""Place in the header of a record where the lengths of its name and extra field are, which its bytes follow."""


def looks_like_one(path: Path) -> bool:
    """Tell by the first bytes whether a file is an archive of `torch.save`."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def load(source: Source, *, allow_pickle: bool) -> object:
    """Load a file on the CPU. Its tensors view the file, so that memory follows what is read of them.

    Args:
        source: the file.
        allow_pickle: True to run whatever code the file asks for.

    Raises:
        InputError: if it is no such archive, declares more than it holds, or needs more than plain tensors,
            containers, numbers and text.
    """
    import torch

    _check_archive(source, trusted=allow_pickle)
    try:
        # Kinds of tensors that torch no longer recommends are the business of who wrote the file.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source.path, map_location="cpu", mmap=True, weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        words = " ".join(str(error).split())
        wanted = words.partition("Unsupported global: GLOBAL ")[2].partition(" ")[0]
        requirement = f"the class {wanted}" if wanted else "more than plain tensors and containers"
        raise InputError(
            f"{source.name}: loading it needs {requirement}, which would run code from the file; "
            "if you trust who wrote it, add --allow-pickle"
        ) from None
    except MemoryError:
        raise InputError(f"{source.name}: asks for more memory than there is; the file is damaged") from None
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except Exception as error:  # a hostile pickle makes the unpickler raise anything
        kind = type(error).__name__
        raise InputError(f"{source.name}: not a readable file of torch.save ({kind}); write or copy it again") from None


def _check_archive(source: Source, *, trusted: bool) -> None:
    """Refuse archives whose records are compressed, or add up to more than the file: torch.save writes neither.

    Of a file that is not trusted the pickle is followed as well, before torch does.
    """
    path = Path(source.path)
    if not looks_like_one(path):
        raise InputError(f"{source.name}: not an archive of torch.save; slime writes such files since torch 1.6")
    try:
        size = path.stat().st_size
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            _check_sizes(source.name, records, size)
            if not trusted:
                check_pickle(_pickle(file, archive))
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, struct.error):
        raise InputError(f"{source.name}: the archive is truncated or damaged; write or copy it again") from None
    except ValueError as error:
        raise InputError(f"{source.name}: not a pickle of a dump ({error}); write or copy it again") from None


def _check_sizes(name: str, records: Sequence[zipfile.ZipInfo], size: int) -> None:
    declared = sum(record.file_size for record in records)
    if len(records) > _MOST_RECORDS or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise InputError(f"{name}: a compressed archive, which torch.save does not write; it is not read")
    if declared > size:
        raise InputError(f"{name}: the archive declares {declared:,} bytes in a file of {size:,}; it is not read")


def _pickle(file: BinaryIO, archive: zipfile.ZipFile) -> bytes:
    """Return the one pickle of an archive, as torch finds it: it looks at neither checksums nor the case of names.

    Raises:
        ValueError: if it has none or several, or something before its first record, which torch and Python take for
            another archive each.
    """
    records = archive.infolist()
    names = {record.filename.lower() for record in records}
    pickles = [record for record in records if record.filename.lower().endswith("/data.pkl")]
    if len(names) < len(records) or len(pickles) != 1 or archive.comment or min(e.header_offset for e in records):
        raise ValueError("the archive has not one data.pkl")
    file.seek(pickles[0].header_offset + _NAME_LENGTHS_AT)
    file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
    return file.read(pickles[0].file_size)
