"""Follow logs of numbers alone: what a trainer prints, JSON Lines, the folder of a wandb run, a trackio project."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolloutdoctor.commands.follow.dumps import below
from rolloutdoctor.commands.follow.feed import Fresh, whole_steps
from rolloutdoctor.commands.follow.trail import Trail
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, SeveralRunsError


class LogFeed:
    """Logs without rollouts: their steps are those that were logged. They are read whole whenever they have grown."""

    def __init__(self, paths: Sequence[str], options: ConvertOptions, trainer: str | None) -> None:
        self._paths, self._options, self._trainer = tuple(paths), options, trainer
        self.files = tuple(Source.of(path).name for path in paths)
        self.name = " ".join(self.files)
        self.trail = Trail()
        self.replaced, self.waits_for = False, ""
        self._stamps: dict[str, tuple[int, int]] = {}

    def rewind(self) -> None:
        """Nothing is kept of what was read."""

    def changed(self) -> bool:
        """Tell whether a file is new or has changed."""
        before, self._stamps = self._stamps, {}
        for path in self._paths:
            # A trackio project has its latest rows in a file beside it, and a run in it is named by a path inside.
            files = (each for base in (path, str(Path(path).parent)) for each in (base, f"{base}-wal"))
            for file in (*files, *below([path])):
                if Path(file).is_file():
                    status = Path(file).stat()
                    self._stamps[file] = status.st_size, status.st_mtime_ns
        return self._stamps != before

    @contextmanager
    def fresh(self, counted: StepSpans, *, ended: bool) -> Iterator[Fresh | None]:
        """Read the logs; a last line without its end waits.

        Raises:
            InputError: if a step that was counted is there no more.
            SeveralRunsError: if the logs are of several runs.
        """
        opening = open_any(
            self._paths, trainer=self._trainer, options=self._options, tell=lambda sentence: None, logs_alone=True
        )
        try:
            with lines.growing(), opening as run:
                pass
        except SeveralRunsError:
            raise
        except RolloutDoctorError as error:
            if ended:
                raise
            # A file that is replaced may be half written.
            self.waits_for = str(error)
            yield None
            return
        self.waits_for = ""
        there = run.metrics.steps()
        gone = next((key for key in counted if key not in run.metrics), None)
        if gone is not None:
            raise InputError(
                f"{self.name}: step {gone.step} was counted and is there no more, so that the log was cut off or "
                "replaced; follow it from its start with another --state"
            )
        for key in there:
            self.trail.add(key, dict(run.metrics.at(key)))
        begun = max(key.step for key in there)
        ready = tuple(whole_steps(there, counted, begun=begun, logged=self.trail.last(TRAIN), ended=ended))
        yield Fresh(run, ready) if ready else None
