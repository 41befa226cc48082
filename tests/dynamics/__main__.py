"""Train with planted dynamics and without, and say what the logs alone told: docs/dynamics.md.

``python tests/dynamics [FOLDER] [--seeds N] [--clean N] [--page]``: what is in the folder is not made again.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import rolloutdoctor
from dynamics.trainings import Planted, clean, planted, train
from rolloutdoctor.results.findings import Report, Severity

HERE = Path(__file__).resolve().parent
INTRODUCTION = """\
# Trainings checked by their logs alone

`make dynamics` makes these trainings, checks them without an option and writes this page. Each is a real training
of a tiny model with TRL, of 60 optimizer steps, with one fault of its dynamics or none. *Right*: the first sentence
names the fault, with its onset within two steps where it has one; of a clean training: there is no warning and no
error. Clean ones are drawn over rewards (dense; sparse and often wrong; noise alone; weighted sums of up to three),
KL coefficients from 0 to 1, five losses, ratios of tokens and of sequences, three scalings, learning rates from
3e-5 to 1.6e-3 with three schedules, temperatures, group sizes, accumulation, one to four updates a batch, a sampler
of its own, and logged lines of one, two and five steps."""
PAGE = HERE.parent.parent / "docs" / "dynamics.md"
FILES = ("trainer_state.json", "train.log")


def page(runs: Mapping[str, int], named: Mapping[str, int], wrong: Sequence[str]) -> str:
    """Say what became of the trainings."""
    kinds = list(dict.fromkeys(kind for kind, _ in runs))
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        "| training | trainings | right by trainer_state.json | right by the console |",
        "| --- | ---: | ---: | ---: |",
    ]
    counts = [(kind, *(found[kind, name] for found in (runs, named) for name in FILES)) for kind in kinds]
    lines += [f"| {kind} | {count} | {state} | {printed} |" for kind, count, _, state, printed in counts]
    return "\n".join([*lines, "", *(f"- {one}" for one in wrong), ""])


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
    parser.add_argument("--kept", action="store_true", help="check what is in the folder, and train nothing")
    parser.add_argument("--page", action="store_true", help="write docs/dynamics.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    named: Counter[tuple[str, str]] = Counter()
    runs: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
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
