"""Make labelled runs, check them, and say what became of each.

``python tests/lab/labelled`` makes the runs that are not there yet and checks all; the package that is checked is the
one on ``PYTHONPATH``. ``--page`` writes ``tests/lab/labelled/results.md``.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHDYNAMO_DISABLE"] = "1"
LAB = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(LAB), str(LAB.parent)]
if not os.environ.get("PYTHONPATH"):
    sys.path.insert(2, str(LAB.parents[1]))

from labelled import outcomes  # noqa: E402 - found by the line before

FOLDER = LAB / "labelled" / "runs"


@dataclass(frozen=True)
class Labelled:
    """A run and what is true of it.

    Attributes:
        family: "trl", "verl", "slime", "rows" or "agents".
        name: of the kind, or of the clean run.
        strength: "weak", "middle", "strong" or "clean".
        expected: codes that name its fault; none: it is clean.
        words: what the strength is.
        make: writes it.
        information: a finding that is information alone names it, too.
        true: codes of what holds of the trainer itself.
        planted: size of the fault in the unit of the rule's bound, where it is known.
    """

    family: str
    name: str
    strength: str
    expected: tuple[str, ...]
    words: str
    make: Callable[[Path], None]
    information: bool = False
    true: tuple[str, ...] = ()
    planted: float | None = None

    def path(self, folder: Path) -> Path:
        """Where it is."""
        slug = "".join(each if each.isalnum() else "-" for each in f"{self.name}-{self.strength}")
        return folder / self.family / f"{slug}.parquet"


DRAWN_VERL = ("RDA001", "RDA029", "RDG009")
"""True of some drawn options of verl: a KL in the reward and in the loss (RDG009), and a reward on a token that is
masked, which the release drops (RDA029)."""
DRAWN_SLIME = ("RDA001", "RDA002", "RDA011", "RDG010", "RDM001")
"""The same of slime: some rewards are all equal (RDA011), and the release counts a token for each fully masked response
(RDG010)."""


def every_run() -> Iterator[Labelled]:
    """The collection, clean runs first."""
    from labelled import agents, clean, kinds, real_functions
    from labelled.trl_training import train

    for name, training in clean.clean_trainings():
        yield Labelled("trl", name, "clean", (), "", partial(train, training), true=clean.true_of(training))
    for name, make in real_functions.verl_clean():
        yield Labelled("verl", name, "clean", (), "", make, true=DRAWN_VERL)
    for name, make in real_functions.slime_clean():
        yield Labelled("slime", name, "clean", (), "", make, true=DRAWN_SLIME)
    for name, make, true in agents.clean_agents():
        yield Labelled("agents", name, "clean", (), "", make, true=true)
    for kind in kinds.KINDS:
        for strength, value in zip(outcomes.STRENGTHS, kind.strengths, strict=True):
            training = kind.training(value)
            values = ", ".join(f"{each:.3g}" for each in kind.strengths)
            yield Labelled(
                "trl", kind.name, strength, kind.expected, f"{kind.words}: {values}", partial(train, training),
                kind.information, clean.true_of(training),
            )  # fmt: skip
    others = (
        ("verl", real_functions.verl_kinds()),
        ("slime", real_functions.slime_kinds()),
        ("rows", real_functions.sampled_kinds()),
        ("agents", agents.kinds_of_agents()),
    )
    for family, planted in others:
        for each in planted:
            for strength, make in each.makers.items():
                about = family, each.name, strength, each.expected, each.words, make, each.information
                yield Labelled(*about, planted=each.planted.get(strength))


def made(run: Labelled, folder: Path, fresh: bool) -> Path:
    """The run file, made if it is not there."""
    path = run.path(folder)
    if path.exists() and not fresh:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    # Made elsewhere and moved, the log first: others may read the folder.
    with tempfile.TemporaryDirectory(dir=folder) as scratch, contextlib.redirect_stdout(io.StringIO()):
        run.make(Path(scratch) / path.name)
        for file in sorted(Path(scratch).iterdir()):
            file.replace(path.parent / file.name)
    print(
        f"made {run.family} {run.name}, {run.strength}: {time.perf_counter() - began:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return path


def checked(run: Labelled, path: Path) -> outcomes.Checked:
    """Check a run."""
    import rolloutdoctor as rd
    from rolloutdoctor.results.errors import RolloutDoctorError
    from rolloutdoctor.views.structured import body

    began = time.perf_counter()
    about = (run.family, run.name, run.strength, run.expected)
    try:
        report = body(rd.check(rd.open(path)))
    except RolloutDoctorError as error:
        return outcomes.Checked(*about, outcomes.REFUSED, (), False, time.perf_counter() - began, str(error))
    found = outcomes.judged(report, run.expected, run.information, run.true, run.planted)
    return outcomes.Checked(*about, **found, seconds=round(time.perf_counter() - began, 2))


def main() -> int:
    """Make, check, and say."""
    parser = argparse.ArgumentParser(prog="python tests/lab/labelled", description=__doc__)
    parser.add_argument(
        "--runs", type=Path, default=Path(os.environ.get("LABELLED_RUNS", FOLDER)), help="folder of the runs"
    )
    parser.add_argument("--only", default="", help="runs whose family, name and strength hold this")
    parser.add_argument("--make", action="store_true", help="make the runs, and check none")
    parser.add_argument("--kept", action="store_true", help="check the runs that are there, and make none")
    parser.add_argument("--fresh", action="store_true", help="make the runs anew")
    parser.add_argument("--every", type=int, default=1, help="every Nth run alone")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--compare", type=Path, help="say what differs from the outcomes in this file")
    parser.add_argument("--page", action="store_true", help="write tests/lab/labelled/results.md")
    parser.add_argument("--quiet", action="store_true", help="totals alone")
    chosen = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    runs = [run for run in every_run() if chosen.only in f"{run.family} {run.name} {run.strength}"][:: chosen.every]
    found, words, wrong = [], {}, 0
    for run in runs:
        try:
            path = run.path(chosen.runs) if chosen.kept else made(run, chosen.runs, chosen.fresh)
        except Exception as error:
            wrong += 1
            print(
                f"not made: {run.family} {run.name}, {run.strength}: {type(error).__name__}: {error}", file=sys.stderr
            )
            continue
        if chosen.make or not path.exists():
            continue
        words[run.name] = run.words
        found.append(checked(run, path))
        if not chosen.quiet and found[-1].outcome not in (outcomes.NAMED, outcomes.SILENT):
            one = found[-1]
            print(
                f"{one.outcome:12} {one.family} {one.key}; expected {one.expected}: {one.found} {one.said}", flush=True
            )
    if found:
        say(found)
    if chosen.compare:
        before = [outcomes.Checked(**each) for each in json.loads(chosen.compare.read_text())["runs"]]
        print("\n".join(["", f"Since {chosen.compare.name}:", *(outcomes.changes(before, found) or ["no change"])]))
    if chosen.json:
        body = {"totals": outcomes.totals(found), "runs": [one.as_json() for one in found]}
        chosen.json.write_text(json.dumps(body, indent=1) + "\n")
    if chosen.page:
        (LAB / "labelled" / "results.md").write_text(outcomes.page(found, words))
    return min(1, wrong)


def say(found: list[outcomes.Checked]) -> None:
    """Print totals."""
    import rolloutdoctor

    print(f"\n{Path(rolloutdoctor.__file__).parent}: {len(found)} runs, {sum(one.seconds for one in found):.0f} s")
    for title, row in outcomes.totals(found).items():
        print(f"{title}: " + ", ".join(f"{value} {name}" for name, value in row.items() if value or name == "runs"))
    for code, count, example in outcomes.accusations(found):
        print(f"accuses clean runs: {code} in {count}, as {example}")


if __name__ == "__main__":
    sys.exit(main())
