"""`identify`: which objective made the logged numbers of a run."""

from dataclasses import replace

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.metric_selection import comparable
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.io.run import Run
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import UnstatedError
from rolloutdoctor.results.identification import Identification
from rolloutdoctor.search.identify import Identifier, known_of
from rolloutdoctor.search.identify_steps import StepReader


def identify(run: Run, options: ReadOptions) -> Identification:
    """Find the objective that made the logged numbers of a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    try:
        configured = configure(run.metadata, options.trainer, options.layers)
    except UnstatedError:
        configured = None
    premises = known_of(run, options.trainer, options.layers, configured)
    metrics, dtype = comparable(run.metrics, configured), find_dtype(options.dtype)
    reader = StepReader(run, options, metrics, premises.trainers[0][0], dtype)
    with evaluation_mode():
        return replace(Identifier(run, premises, reader).find(), notes=run.notes.sentences)
