"""Train with faulty dynamics and without, and count which reports of the logs are right: tests/lab/dynamics/results.md.

``python tests/lab/dynamics [FOLDER] [--seeds N] [--clean N] [--drawn N] [--first SEED] [--page]``: what is in the
folder is not made again.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import rolloutdoctor
from dynamics import drawn
from dynamics.trainings import Planted, clean, planted, train
from rolloutdoctor.results.findings import Report, Severity

HERE = Path(__file__).resolve().parent
INTRODUCTION = """\
# Trainings checked by their logs alone

`make dynamics` makes these trainings, checks them without options and writes this file. Each is a real training
of a tiny model with TRL over 60 optimizer steps, with one fault in its dynamics or none. The report of a fault is right
if its first finding names the fault and, where the fault has an onset, gives it within two steps. The report of a clean
training is right if it has no warning and no error.

Clean trainings vary the reward (dense; sparse and often wrong; pure noise; weighted sums of up to three), the KL
coefficient (0 to 1), the loss (five types), the level of the ratio (token or sequence), the scaling of rewards (three),
the learning rate (3e-5 to 1.6e-3, three schedules), the temperature, the group size, gradient accumulation, updates per
batch (one to four), the sampler (the trainer's own or a separate one) and the logging interval (1, 2 or 5 steps)."""
PAGE = HERE / "results.md"
FILES = ("trainer_state.json", "train.log")


def page(runs: Mapping[str, int], named: Mapping[str, int], wrong: Sequence[str]) -> str:
    """Return the text of results.md with the counts."""
    kinds = list(dict.fromkeys(kind for kind, _ in runs))
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        "| fault | trainings | right from trainer_state.json | right from the console log |",
        "| --- | ---: | ---: | ---: |",
    ]
    counts = [(kind, *(found[kind, name] for found in (runs, named) for name in FILES)) for kind in kinds]
    lines += [f"| {kind} | {count} | {state} | {printed} |" for kind, count, _, state, printed in counts]
    reports = ["", "Reports that are not right:", "", *(f"- {one}" for one in wrong)] if wrong else []
    return "\n".join([*lines, *reports, ""])


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
    parser.add_argument("--clean", type=int, default=120)
    parser.add_argument("--drawn", type=int, default=0, help="trainings of each fault of the second design")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of these: one that nobody looked at")
    parser.add_argument("--kept", action="store_true", help="check what is in the folder, and train nothing")
    parser.add_argument("--page", action="store_true", help="write tests/lab/dynamics/results.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    named: Counter[tuple[str, str]] = Counter()
    runs: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    cases: list[tuple[str, Planted]] = [
        (f"{one.name}-{seed}", one) for seed in range(given.seeds) for one in planted(seed)
    ]
    cases += [(f"clean-{seed}", clean(seed)) for seed in range(given.clean)]
    cases += [
        (f"drawn-{kind}-{seed}", drawn.planted(kind, seed))
        for seed in range(given.first, given.first + given.drawn)
        for kind in drawn.KINDS
    ]
    of_clean = range(30 * given.first, 30 * (given.first + given.drawn))
    cases += [(f"drawn-clean-{seed}", drawn.clean(seed)) for seed in of_clean]
    for name, case in cases:
        folder = given.folder / name
        if not (folder / "trainer_state.json").exists():
            if given.kept:
                continue
            train(case, folder)
        for file in FILES:
            report = checked(folder / file)
            runs[case.name, file] += 1
            loud = [one for one in report.findings if one.severity > Severity.INFO]
            first = report.findings[0].code if report.findings else "nothing"
            if case.codes:
                at = onset_of(report) if report.findings else None
                near = case.onset is None or (at is not None and abs(at - case.onset) <= 2)
                right = first in case.codes and near
            else:
                right, at = not loud, None
            named[case.name, file] += right
            if not right:
                more = "; ".join(f"{one.code} {one.severity.label}: {one.headline}" for one in report.findings[:3])
                expected = " or ".join(case.codes) or "nothing"
                wrong.append(f"{name}, {file}: {more or 'nothing'}; expected {expected} {case.onset or ''}".rstrip())
                print(wrong[-1], flush=True)
    for kind, count in runs.items():
        print(f"{' '.join(kind)}: {named[kind]} of {count}")
    if given.page:
        PAGE.write_text(page(runs, named, wrong))


if __name__ == "__main__":
    main()
