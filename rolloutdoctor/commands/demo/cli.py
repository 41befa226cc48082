"""``rolloutdoctor demo``: check the runs that come with the package."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

import rolloutdoctor
from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import write_whole
from rolloutdoctor.cli.terminal import show
from rolloutdoctor.results.errors import UsageError, nearest

if TYPE_CHECKING:
    from rolloutdoctor.views.style import Style


class Demo(NamedTuple):
    """A run that comes with the package: its file, the metrics beside it, and what it is."""

    file: str
    beside: tuple[str, ...]
    words: str


DEMOS = {
    "log": Demo("verifier_dies.log", (), "the console log of a TRL run whose verifier dies after 60 steps"),
    "rejected": Demo(
        "verl_rejected.parquet",
        ("verl_rejected.metrics.parquet",),
        "a recorded run whose rejected responses still shift the baselines of their groups",
    ),
    "healthy": Demo("healthy.parquet", ("healthy.metrics.parquet",), "a recorded TRL run in which nothing is wrong"),
}

YOUR_OWN = """\
Whole reports: rolloutdoctor demo log, rolloutdoctor demo rejected, rolloutdoctor demo healthy.
The files, to try other commands on: rolloutdoctor demo --copy-to DIR

Your own run
  what it wrote anyway   rolloutdoctor check train.log     # or outputs/, trainer_state.json, wandb/run-.../
  with its rollouts      record(trainer, "run.parquet") of rolloutdoctor.recorders.trl before trainer.train();
                         for verl, slime and other trainers: rolloutdoctor info PATH names the option or recorder
"""


def folder() -> Path:
    """Return where the demo runs are: beside the installed package's code, or in the checkout."""
    package = Path(rolloutdoctor.__file__).parent
    installed = package / "demo_runs"
    return installed if installed.is_dir() else package.parent / "sample_data"


@guarded
def demo(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help=f"One of {', '.join(DEMOS)}: print its whole report.")
    ] = None,
    copy_to: Annotated[
        Path | None, typer.Option("--copy-to", metavar="DIR", help="Copy the files there and check nothing.")
    ] = None,
    color: opt.ColorOption = opt.Color.auto,
) -> None:
    """Check runs that come with the package: a console log, a run with a fault, a healthy one."""
    if name is not None and name not in DEMOS:
        raise UsageError(f"no demo {name!r} (known: {', '.join(DEMOS)}){nearest(name, list(DEMOS))}")
    wanted = DEMOS if name is None else {name: DEMOS[name]}
    if copy_to is not None:
        _copy(wanted, copy_to)
        return
    style = replace(opt.style_of(color, to_file=False, verbose=False), quiet=name is None)
    for each in wanted:
        show(_report(each, style), colored=style.color)
    if name is None:
        show(YOUR_OWN)


def _report(name: str, style: "Style") -> str:
    from rolloutdoctor.engine.check import check
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.views.table import RENDERERS

    demo = DEMOS[name]
    run = dumps.opened([str(folder() / demo.file)], groups.Source(), quiet=True, logs_alone=True)
    report = RENDERERS["full"](check(run, CheckOptions()), style)
    return f"$ rolloutdoctor check {demo.file}     # {demo.words}\n{report}\n"


def _copy(wanted: dict[str, Demo], target: Path) -> None:
    """Copy the files of some demos into a folder; what is there already is never overwritten.

    Raises:
        UsageError: if a file is there, or the folder cannot be written.
    """
    names = [file for demo in wanted.values() for file in (demo.file, *demo.beside)]
    there = [file for file in names if (target / file).exists()]
    if there:
        raise UsageError(f"{target / there[0]} is there already: name another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}; name a folder that can be written") from error
    for file in names:
        write_whole((folder() / file).read_bytes(), str(target / file))
    show("".join(f"{target / file}\n" for file in names))
