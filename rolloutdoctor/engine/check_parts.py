"""`check` in parts: what is measured of each, and what its state is in JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.engine.parts import Executor, Part, Work, added
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.serial import measure
from rolloutdoctor.io.progress import Progress


@dataclass(frozen=True)
class CheckWork(Work[RunState]):
    """Lets the rules measure a part.

    Attributes:
        options: of the check; the steps are those of the part.
    """

    options: CheckOptions
    kind = RunState

    def measure(self, part: Part, progress: Progress | None) -> RunState:
        """Plan with what is known of the whole run, and measure the part."""
        return measure(prepare(part.run, replace(self.options, steps=part.steps)), progress)

    def among(self, parts: int) -> "CheckWork":
        """Return the same work with the part's own share of the memory."""
        return replace(self, options=replace(self.options, memory=self.options.memory.shared(parts)))

    def usable(self, state: RunState) -> RunState:
        """Return a state that was stored, with its rows on disk if they take more than the memory."""
        return replace(state, tables=state.tables.within(self.options.memory))

    def identity(self) -> str:
        """The rules, the fixes and every option that says how to read."""
        options = self.options
        rules, fixes = [rule.code for rule in options.rules], [fix.label for fix in options.fixes]
        return repr(("check", rules, fixes, reading_identity(options)))


def reading_identity(options: ReadOptions) -> Sequence[object]:
    """Return the shared options that a state depends on; the steps belong to the part."""
    layers = [(layer.origin, sorted(layer.values.items(), key=lambda one: one[0])) for layer in options.layers]
    return (options.trainer, layers, options.split, options.device, options.dtype)


def measure_with(executor: Executor | None, prepared: PreparedRun, progress: Progress | None = None) -> RunState:
    """Measure a run in parts, and add their states.

    Args:
        executor: where; None: in this process.
        prepared: the run, and what can be checked of it.
        progress: called with what is done and what there is to do, in the run's `unit`.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read or breaks the contract, or a part cannot be measured.
    """
    if executor is None or prepared.run.metrics_only:
        return measure(prepared, progress)
    options = prepared.options
    return added(executor.measure(CheckWork(options), prepared.run, options.steps, options.split, progress))
