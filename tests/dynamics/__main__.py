"""Train with planted dynamics and without, and say what the logs alone told.

``python tests/dynamics [FOLDER] [--seeds N] [--clean N]``: trainings that are in the folder are not made again.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import rolloutdoctor
from dynamics.trainings import Planted, clean, planted, train
from rolloutdoctor.results.findings import Report, Severity

HERE = Path(__file__).resolve().parent


def checked(path: Path) -> Report:
    """Check a log without a flag."""
    return rolloutdoctor.check(path)


def onset_of(report: Report) -> float | None:
    """Step at which the first finding begins."""
    first = report.findings[0]
    return first.examples[0].step if first.onset is None and first.examples else first.onset


def main() -> None:
    """Make what is missing, check all, and print what was missed and what was accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--kept", action="store_true", help="check what is in the folder, and train nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    named: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    cases: list[tuple[str, Planted]] = [
        (f"{one.name}-{seed}", one) for seed in range(given.seeds) for one in planted(seed)
    ]
    cases += [(f"clean-{seed}", clean(seed)) for seed in range(given.clean)]
    for name, case in cases:
        folder = given.folder / name
        if not (folder / "trainer_state.json").exists():
            if given.kept:
                continue
            train(case, folder)
        for file in ("trainer_state.json", "train.log"):
            report = checked(folder / file)
            runs[f"{case.name} {file}"] += 1
            loud = [one for one in report.findings if one.severity > Severity.INFO]
            first = report.findings[0].code if report.findings else "nothing"
            if case.codes:
                at = onset_of(report) if report.findings else None
                near = case.onset is None or (at is not None and abs(at - case.onset) <= 2)
                right = first in case.codes and near
            else:
                right, at = not loud, None
            named[f"{case.name} {file}"] += right
            if not right:
                more = "; ".join(f"{one.code} {one.severity.label}: {one.headline}" for one in report.findings[:3])
                print(f"{name} {file}: {more or 'nothing'}, onset {at}, expected {case.codes} {case.onset or ''}")
    for kind, count in runs.items():
        print(f"{kind}: {named[kind]} of {count}")


if __name__ == "__main__":
    main()
