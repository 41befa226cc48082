"""What ``check`` does with a command line: check one run, several, or a growing one, or list the places of a rule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rolloutdoctor.cli import dumps, groups, states, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.cli.progress import progress_bar
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.commands.check.baseline import Baselines, Known, compared_with_baseline, read, written
from rolloutdoctor.commands.check.each_cli import check_several, runs_at
from rolloutdoctor.commands.check.listing import list_rule, one_rule
from rolloutdoctor.commands.follow.cli import Following, follow
from rolloutdoctor.results.errors import SeveralRunsError

if TYPE_CHECKING:
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.engine.parts import Executor
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.results.figures import Gallery
    from rolloutdoctor.results.findings import Report


@dataclass(frozen=True)
class Asked:
    """A command line of ``check`` whose options fit together.

    Attributes:
        paths: as the user gave them.
        source: who made the run.
        options: what to check, and how.
        judging: how the report is written, and when the exit code is 1.
        must_test: codes of the rules that must not be skipped.
        each: True for one line for each of several runs.
        list_: the rule whose places are listed, or None.
        scale: where parts are measured.
        executor: the same, made.
        following: whether and how to follow.
        baselines: findings that are known.
    """

    paths: list[str]
    source: groups.Source
    options: "CheckOptions"
    judging: verdict.Judging
    must_test: frozenset[str]
    each: bool
    list_: str | None
    scale: verdict.Saved
    executor: "Executor | None"
    following: Following
    baselines: Baselines

    @property
    def draws(self) -> bool:
        """True for histograms below the report: they take one process, and are not part of a state."""
        is_full = self.judging.verbose and self.judging.format_ is opt.Format.full
        return is_full and self.scale.is_one_process and self.scale.save_state is None

    @property
    def is_of_one_run(self) -> bool:
        """True if options have no meaning for several runs."""
        files = self.scale.save_state, self.baselines.baseline, self.baselines.write_baseline, self.list_
        return any(files) or not self.scale.is_one_process


Mode = Callable[[Asked], int]


def mode_of(asked: Asked) -> Mode:
    """Choose what to do, as a function that prints and returns the exit code."""
    return followed if asked.following.follow else several if asked.each else one


def several(asked: Asked) -> int:
    """Check several runs, one line for each."""
    return check_several(asked.paths, asked.source, asked.options, asked.judging, asked.must_test)


def followed(asked: Asked) -> int:
    """Check a run while it grows, and print the report at its end."""
    baseline = _targets(asked)
    judging = asked.judging
    report, state = follow(
        asked.paths,
        replace(asked.source.dump, text=True),
        asked.options,
        asked.following,
        lambda report: _finish(asked, baseline, report),
        lines_on_stderr=judging.format_ not in (opt.Format.full, opt.Format.concise) and judging.output_file is None,
        quiet=judging.quiet,
    )
    if asked.scale.save_state is not None and state.saved is not None:
        states.save(state.saved, asked.scale.save_state)
    return _finish(asked, baseline, report)


def one(asked: Asked) -> int:
    """Check one run, or list the places of one rule; several where the paths turn out to hold several."""
    run = _opened(asked)
    if run is None:
        return several(asked)
    if asked.list_ is not None:
        return list_rule(run, one_rule(asked.list_), asked.options, asked.judging.format_, asked.judging.output_file)
    from rolloutdoctor.commands.check.runs_of_log import of_worst_run
    from rolloutdoctor.engine.check import check_in_parts

    baseline, scale = _targets(asked), asked.scale
    hint = verdict.faster(scale.engine, scale.workers)
    gallery = None
    with progress_bar(run.unit, quiet=asked.judging.quiet, hint=hint) as progress:
        # A log alone has no rows to draw.
        if asked.draws and not run.metrics_only:
            from rolloutdoctor.commands.plot.query import check_and_draw

            report, gallery = check_and_draw(
                run, ("advantages", "kl", "ratio"), asked.options, progress=progress, executor=asked.executor
            )
        else:
            checked = check_in_parts(run, asked.options, progress, asked.executor)
            report = checked.report
            if asked.scale.save_state is not None:
                from rolloutdoctor.engine.merged import saved_state

                states.save(saved_state(checked.prepared, checked.state), asked.scale.save_state)
            # A state is of the run that was read.
            report = of_worst_run(run, report, asked.options if asked.scale.save_state is None else None)
    code = _finish(asked, baseline, report, gallery)
    opt.warn_of_partial(run, quiet=asked.judging.quiet)
    return code


def _opened(asked: Asked) -> "Run | None":
    """Open the run; None where the paths hold several runs, which are checked one after the other.

    Raises:
        SeveralRunsError: if they hold several, and an option is about one.
    """
    form, quiet = asked.judging.format_, asked.judging.quiet
    says_notes = asked.list_ is not None or form in _WITHOUT_NOTES
    try:
        return dumps.opened(asked.paths, asked.source, quiet=quiet, text=True, logs_alone=True, says_notes=says_notes)
    except SeveralRunsError as error:
        from rolloutdoctor.commands.check.several import RENDERERS

        count = 0 if asked.is_of_one_run else len(runs_at(asked.paths, asked.source.dump))
        if form.value not in RENDERERS or not 2 <= count <= _MOST_RUNS:
            raise
        if not quiet:
            say(f"{str(error).partition(';')[0]}: one line for each run")
        return None


def _targets(asked: Asked) -> tuple[Known, ...] | None:
    """Refuse what cannot be written before anything is computed, and return the findings that are known."""
    asked.judging.check_targets()
    check_target(asked.scale.save_state)
    check_target(asked.baselines.write_baseline)
    return None if asked.baselines.baseline is None else read(asked.baselines.baseline)


def _finish(asked: Asked, base: tuple[Known, ...] | None, report: "Report", gallery: "Gallery | None" = None) -> int:
    """Print the report, write the baseline, and return the exit code."""
    judging, below = asked.judging, ""
    report, new = compared_with_baseline(report, base)
    if gallery is not None:
        from rolloutdoctor.views.histogram import histograms

        below = histograms(gallery, judging.style())
    judging.deliver(report, below)
    if asked.baselines.write_baseline is not None:
        write_whole(written(report), asked.baselines.write_baseline)
    return judging.exit_code(new, asked.must_test)


_MOST_RUNS = 50
"""Runs of a project that are checked though nobody asked for each."""

_WITHOUT_NOTES = (opt.Format.concise, opt.Format.junit, opt.Format.github)
"""Formats with a place for rules alone: what readers noted goes to stderr."""
