"""What moved since the releases that were read: `make drift` writes tests/lab/drift/results.md.

    python tests/lab/drift                               the newest release of every package, from the index
    python tests/lab/drift --wheels FOLDER               the wheels of a folder, without a network
    python tests/lab/drift --read WHEEL --goldens FILE   a release is read: its functions and options are the ones known

It ends with 1 where a release is newer than the last that was read.
"""

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from drift import index, report, source
from drift.watched import PACKAGES

from rolloutdoctor.trainers.releases import parse_version


def wheels_of_index(folder: Path) -> dict[str, Path]:
    """The newest wheel of every package that the index has."""
    found = {}
    for package in PACKAGES:
        release = index.newest(package)
        wheel = index.wheel_of(package, release, folder) if release else None
        if wheel is None:
            print(f"{package}: no release can be had from the index", file=sys.stderr)
        else:
            found[package] = wheel
    return found


def _in_order(wheels: dict[str, Path]) -> list[tuple[str, Path]]:
    return [(package, wheels[package]) for package in PACKAGES if package in wheels]


def main(arguments: list[str]) -> int:
    """Compare, or store what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to compare in place of the index's")
    parser.add_argument("--read", type=Path, help="wheel of a release that was read")
    parser.add_argument("--goldens", type=Path, help="stored results of its functions")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    given = parser.parse_args(arguments)
    if given.read:
        if given.goldens is None or not given.goldens.exists():
            parser.error("a release is read when results of its own functions are stored: name them with --goldens")
        report.store(given.read, given.goldens)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        if given.wheels:
            by_age = sorted(given.wheels.glob("*.whl"), key=lambda wheel: parse_version(source.release_in(wheel)))
            wheels = {source.package_in(wheel): wheel for wheel in by_age}
        else:
            wheels = wheels_of_index(Path(scratch))
        if not wheels:
            print("no wheel to compare: is there a network? --wheels FOLDER needs none", file=sys.stderr)
            return 2
        moves = [report.compare(package, wheel) for package, wheel in _in_order(wheels)]
    given.page.write_text(report.page(moves, datetime.date.today().isoformat()), encoding="utf-8")
    for move in moves:
        print(move)
    return int(any(move.is_newer for move in moves))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
