"""Files of `torch.save`, loaded without running code and without trusting the sizes that they declare."""

import pickle
import warnings
import zipfile
from pathlib import Path

from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

_MOST_RECORDS = 2_000_000


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

    _check_archive(source)
    try:
        # Kinds of tensors that torch no longer recommends are the business of who wrote the file.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source.path, map_location="cpu", mmap=True, weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        words = " ".join(str(error).split())
        wanted = words.partition("Unsupported global: GLOBAL ")[2].partition(" ")[0]
        what = f"the class {wanted}" if wanted else "more than plain tensors and containers"
        raise InputError(
            f"{source.name}: loading it needs {what}, which would run code from the file; "
            "if you trust who wrote it, add --allow-pickle"
        ) from None
    except MemoryError:
        raise InputError(f"{source.name}: asks for more memory than there is; the file is damaged") from None
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except Exception as error:  # a hostile pickle makes the unpickler raise anything
        kind = type(error).__name__
        raise InputError(f"{source.name}: not a readable file of torch.save ({kind}); write or copy it again") from None


def _check_archive(source: Source) -> None:
    """Refuse archives whose records are compressed, or add up to more than the file: torch.save writes neither."""
    path = Path(source.path)
    if not looks_like_one(path):
        raise InputError(f"{source.name}: not an archive of torch.save; slime writes such files since torch 1.6")
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        raise InputError(f"{source.name}: the archive is truncated or damaged; write or copy it again") from None
    declared = sum(record.file_size for record in records)
    if len(records) > _MOST_RECORDS or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise InputError(f"{source.name}: a compressed archive, which torch.save does not write; it is not read")
    if declared > size:
        raise InputError(
            f"{source.name}: the archive declares {declared:,} bytes in a file of {size:,}; it is not read"
        )
