"""The package index, through pip."""

import re
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def pip(*arguments: str) -> str:
    """Output of pip; empty where it fails, above all without a network."""
    done = subprocess.run([*PIP, *arguments], capture_output=True, encoding="utf-8", check=False)
    return done.stdout if done.returncode == 0 else ""


def newest(package: str) -> str:
    """Newest release on the index; empty where there is none or no index."""
    found = re.match(r"\S+ \((\S+)\)", pip("index", "versions", "--retries=1", package))
    return found[1] if found else ""


def wheel_of(package: str, release: str, folder: Path) -> Path | None:
    """The wheel of a release, without what it depends on; nothing of it is run."""
    # A wheel of one Python has the same sources as that of another.
    python = ("--python-version=3.11", "--only-binary=:all:")
    pip("download", "--quiet", "--no-deps", *python, f"--dest={folder}", f"{package}=={release}")
    stem = re.sub(r"[-_.]+", "_", package).lower()
    return next(folder.glob(f"{stem}-{release}-*.whl"), None)
