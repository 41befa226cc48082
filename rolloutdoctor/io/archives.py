"""Several files in one: a zip that compresses nothing and knows no time, so that equal files give equal bytes."""

import shutil
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

_ENCRYPTED = 1


def archived(members: Mapping[str, bytes]) -> bytes:
    """Return some files as one."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()


def archive_files(members: Mapping[str, Path], stream: BinaryIO) -> None:
    """Write some files on disk as one, of any size."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name, path in members.items():
            info = zipfile.ZipInfo(name)
            # Or one of 2 GB and more is refused.
            info.file_size = path.stat().st_size
            with path.open("rb") as file, archive.open(info, "w") as member:
                shutil.copyfileobj(file, member)


def unarchived(content: bytes) -> dict[str, bytes]:
    """Return the files of an archive in which nothing is compressed, as `archived` and `torch.save` write them.

    Raises:
        ValueError: if it is no such archive, or one that was damaged: each file has a checksum.
    """
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            infos = archive.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED for info in infos):
                raise ValueError("its files are compressed or encrypted")
            if sum(info.file_size for info in infos) > len(content):
                raise ValueError("its files are larger than it")
            return {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ValueError(str(error)) from None
