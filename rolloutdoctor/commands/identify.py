"""`identify`: which objective made the logged numbers of a run."""

from rolloutdoctor.engine.identify import identify_run
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.identification import Identification


def identify(run: Run, options: ReadOptions) -> Identification:
    """Find the objective that made the logged numbers of a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    return identify_run(run, options)
