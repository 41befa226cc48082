"""Options of the commands that judge a run, and what their exit code means."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import complete
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, NOTHING_CHECKED
from rolloutdoctor.cli.help import RARE
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.engine.parts import Executor
    from rolloutdoctor.results.findings import Report
    from rolloutdoctor.rules.table import AnyRule
    from rolloutdoctor.views.style import Style

SelectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="CODE",
        envvar="ROLLOUTDOCTOR_SELECT",
        help="Only these rules or families.",
        autocompletion=complete.codes,
    ),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="CODE",
        envvar="ROLLOUTDOCTOR_IGNORE",
        help="Skip these rules or families.",
        autocompletion=complete.codes,
    ),
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="CODE",
        envvar="ROLLOUTDOCTOR_REQUIRE",
        help="Exit 3 if one of these rules or families was skipped.",
        autocompletion=complete.codes,
    ),
]
FormatOption = Annotated[
    opt.Format,
    typer.Option(
        "--format",
        envvar="ROLLOUTDOCTOR_FORMAT",
        help="Format of the report; brief is the verdict alone, and so is -q, without a progress bar.",
    ),
]
AlsoOption = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="FORMAT=FILE",
        rich_help_panel=RARE,
        help="Write the report to FILE as well, in this format, e.g. sarif=report.sarif; repeatable.",
    ),
]
FailOnOption = Annotated[
    opt.FailOn,
    typer.Option(
        "--fail-on",
        envvar="ROLLOUTDOCTOR_FAIL_ON",
        help="Lowest severity that makes the exit code 1; never: none does.",
    ),
]
ExitZeroOption = Annotated[
    bool,
    typer.Option("--exit-zero", envvar="ROLLOUTDOCTOR_EXIT_ZERO", hidden=True, help="The same as --fail-on never."),
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        envvar="ROLLOUTDOCTOR_WORKERS",
        help="Number of processes; the result is the same.",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="ray[=ADDRESS]",
        rich_help_panel=RARE,
        help="Measure on a Ray cluster; ray=local starts one here. The result is the same.",
    ),
]
StateDirOption = Annotated[
    str | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        rich_help_panel=RARE,
        help="With --engine ray: save each finished part there; a rerun skips those.",
    ),
]

SaveStateOption = Annotated[
    str | None,
    typer.Option(
        "--save-state",
        rich_help_panel=RARE,
        metavar="FILE",
        help="Also save the state of these steps; the states of all parts take the place of the run.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Options about the verdict: by which rules, in which form, and when the exit code is 1."""

    select: SelectOption = None
    ignore: IgnoreOption = None
    require: RequireOption = None
    format_: FormatOption = opt.Format.full
    output_file: opt.OutputOption = None
    also: AlsoOption = None
    fail_on: FailOnOption = opt.FailOn.error
    exit_zero: ExitZeroOption = False
    color: opt.ColorOption = opt.Color.auto
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", envvar="ROLLOUTDOCTOR_QUIET", hidden=True, help="The same as --format brief."),
    ] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show measures, places, options, references and histograms.")
    ] = False

    def __post_init__(self) -> None:
        """Take ``--exit-zero`` for ``--fail-on never``, and ``--format brief`` for ``--quiet``."""
        if self.exit_zero:
            object.__setattr__(self, "fail_on", opt.FailOn.never)
        if self.format_ is opt.Format.brief:
            object.__setattr__(self, "format_", opt.Format.full)
            object.__setattr__(self, "quiet", True)

    @property
    def is_selective(self) -> bool:
        """True if rules were chosen or left out."""
        return bool(self.select or self.ignore)

    def rules(self) -> "tuple[AnyRule, ...]":
        """Return the rules that are asked for."""
        from rolloutdoctor.rules.table import pick

        return pick(words(self.select), words(self.ignore))

    def style(self) -> "Style":
        """Return how the report is written."""
        from rolloutdoctor.results.findings import Severity

        fails = None if self.fail_on is opt.FailOn.never else Severity[self.fail_on.value.upper()]
        plain = opt.style_of(self.color, to_file=self.output_file is not None, verbose=self.verbose)
        return replace(plain, fail_at=fails, quiet=self.quiet)

    def check_targets(self) -> None:
        """Refuse, before a long run is read, a file that could not be written at its end.

        Raises:
            UsageError: if there is one, or a format of `also` is none.
        """
        check_target(self.output_file, "--output-file")
        for _, path in copies(self.also):
            check_target(path, "--also")

    def deliver(self, report: "Report", below: str = "") -> None:
        """Print the report or write it to a file, and write it in each of the other formats.

        Args:
            report: the report.
            below: text that is printed below it.
        """
        from rolloutdoctor.views.table import RENDERERS

        style = self.style()
        opt.deliver(RENDERERS[self.format_.value](report, style) + below, self.output_file, colored=style.color)
        in_file = replace(style, width=_WIDTH, color=False, unicode=True)
        for form, path in copies(self.also):
            only_verdict = form is opt.Format.brief
            text = RENDERERS[opt.Format.full if only_verdict else form](report, replace(in_file, quiet=only_verdict))
            write_whole(text.encode(), path, "--also")

    def exit_code(self, report: "Report", must_test: frozenset[str] = frozenset()) -> int:
        """Return the exit code of a report; says on stderr which of the rules that must be tested were skipped."""
        return exit_code(report, self.fail_on, must_test=must_test)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Options about where the parts of a run are measured."""

    workers: WorkersOption = 1
    engine: EngineOption = None
    state_dir: StateDirOption = None

    @property
    def is_one_process(self) -> bool:
        """True if this process does it all."""
        return self.workers == 1 and self.engine is None

    def executor(self) -> "Executor | None":
        """Choose where parts are measured; None: in this process."""
        return executor(self.engine, self.workers, self.state_dir)


@dataclass(frozen=True, kw_only=True)
class Saved(Scale):
    """Options about where the parts of a run are measured, and what is saved of them."""

    save_state: SaveStateOption = None


def executor(engine: str | None, workers: int, state_dir: str | None) -> "Executor | None":
    """Choose where parts are measured; None: in this process.

    Raises:
        UsageError: if the options contradict each other, or Ray is not there.
    """
    if engine is None:
        if state_dir is not None:
            raise UsageError("--state-dir keeps the states of parts on a cluster: add --engine ray[=ADDRESS]")
        most = _MOST_PER_CORE * _cores()
        if workers > most:
            raise UsageError(f"--workers {workers}: this machine has {_cores()} cores; {most} processes are the most")
        from rolloutdoctor.engine.processes import Processes

        return Processes(workers) if workers > 1 else None
    name, _, address = engine.partition("=")
    if name != "ray":
        raise UsageError(f"--engine {engine}: no such engine; write ray, ray=ADDRESS or ray=local")
    if workers != 1:
        raise UsageError("--workers is for processes of this machine, and --engine ray for a cluster; give one of them")
    from rolloutdoctor.engine.part_states import StateFolder
    from rolloutdoctor.engine.ray_cluster import RayCluster

    return RayCluster(address, None if state_dir is None else StateFolder(Path(state_dir)))


_MOST_PER_CORE = 8
"""Processes, of 300 MB each: more cores than that may be a mistake, and fewer are a choice."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def faster(engine: str | None, workers: int) -> str | None:
    """Say what would make a long command faster; None where it uses several processes already, or there is one core."""
    cores = _cores()
    if engine is not None or workers > 1 or cores < 2:
        return None
    return f"--workers {cores} would use all {cores} cores of this machine"


_WIDTH = 100
"""Columns of text in a file."""


def copies(also: list[str] | None) -> list[tuple[opt.Format, str]]:
    """Return format and file of each ``FORMAT=FILE``.

    Raises:
        UsageError: if one names no format, or no file.
    """
    targets = []
    for text in also or []:
        form, _, path = text.partition("=")
        if form not in [output_format.value for output_format in opt.Format] or not path:
            raise UsageError(f"--also {text}: write FORMAT=FILE, where FORMAT is {', '.join(opt.Format)}")
        targets.append((opt.Format(form), path))
    return targets


def words(texts: list[str] | None) -> list[str]:
    """Codes may be repeated, or separated by commas."""
    return [word for text in texts or [] for word in text.replace(",", " ").split()]


def required(require: list[str] | None, selected: "Sequence[AnyRule]") -> frozenset[str]:
    """Codes of the rules that must be tested.

    Args:
        require: codes, names or families.
        selected: the rules that run.

    Raises:
        UsageError: if one of them is no rule, or none of it was selected.
    """
    from rolloutdoctor.rules.table import pick

    required_codes: set[str] = set()
    for word in words(require):
        codes = {rule.code for rule in pick([word], []) if rule in selected}
        if not codes:
            raise UsageError(f"--require {word}: it is not among the rules that run; see --select and --ignore")
        required_codes |= codes
    return frozenset(required_codes)


def exit_code(report: "Report", fail_on: opt.FailOn, *, must_test: frozenset[str] = frozenset()) -> int:
    """Return the exit code of a report; says on stderr which required rules were skipped.

    Args:
        report: the report.
        fail_on: the severity that makes the code 1.
        must_test: codes of the rules that must not be skipped.
    """
    from rolloutdoctor.results.findings import Severity
    from rolloutdoctor.views.style import plain

    worst = report.worst()
    untested = [skipped for skipped in report.skipped if skipped.code in must_test]
    for rule in untested:
        say(
            f"{rule.code} {rule.name} is required and was skipped: {plain(rule.reason, 300)}; {plain(rule.remedy, 300)}"
        )
    if report.nothing_checked or untested:
        return NOTHING_CHECKED
    if fail_on is opt.FailOn.never or worst is None:
        return 0
    return FINDINGS if worst >= Severity[fail_on.value.upper()] else 0
