"""Store what a trainer's own functions of a release give: `make.py TRAINER RELEASE [FOLDER OF WHEELS]`.

The sources are taken out of the wheel, from the index where no folder has it; nothing of them is installed.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))

from drift import index

HERE = Path(__file__).parent
REAL = HERE / "real" / "make"
PACKAGES = {"unsloth": "unsloth_zoo", "openrlhf": "openrlhf", "skyrl": "skyrl"}


def unpacked(package: str, release: str, folder: Path, scratch: Path) -> Path:
    """Folder of the sources of a wheel."""
    wheel = next(folder.glob(f"{package}-{release}-*.whl"), None) or index.wheel_of(package, release, scratch)
    if wheel is None:
        sys.exit(f"{package} {release} is neither in {folder} nor on the index")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch / "sources", [name for name in archive.namelist() if name.endswith(".py")])
    inside = scratch / "sources"
    return next(inside.glob("*.data/purelib"), inside)


def commands(trainer: str, release: str, sources: Path, scratch: Path) -> list[list[str]]:
    """What makes the results, and what stores them."""
    if trainer == "unsloth":
        return [[str(HERE / "make_unsloth.py"), f"{release}={sources}"]]
    results = scratch / "results.pkl"
    of_release = [] if trainer == "skyrl" else [release]
    return [
        [str(REAL / f"{trainer}_results.py"), str(sources), str(results), *of_release],
        [str(REAL / "store.py"), trainer, str(results), str(HERE / "real" / trainer), *of_release],
    ]


def main(trainer: str, release: str, wheels: str = ".") -> None:
    """Make and store them."""
    if trainer not in PACKAGES:
        sys.exit(f"TRAINER is one of {', '.join(PACKAGES)}; the others are made from a clone: see their makers")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sources = unpacked(PACKAGES[trainer], release, Path(wheels), scratch)
        for command in commands(trainer, release, sources, scratch):
            subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
