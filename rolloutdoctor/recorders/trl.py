"""Record a run of an unmodified `trl.GRPOTrainer` or `trl.RLOOTrainer`.

    trainer = GRPOTrainer(...)
    record(trainer, "run.parquet")
    trainer.train()

Nothing of the training changes: no random number is drawn, no tensor is written to, and a failure in here
stops the recording with one warning, not the training. While it goes on, a thread writes ``run.parquet.journal``,
step by step: what a killed process leaves of it is read by every command like a run file. With several processes each
one writes ``run.rank0.parquet``, ``run.rank1.parquet``, ...; the first also writes ``run.rank0.metrics.parquet``, and
``run.rank*.parquet`` is the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolloutdoctor.recorders._trl_config import Trainer
from rolloutdoctor.recorders._trl_recorder import Recorder

__all__ = ["DEFAULT_MAX_BYTES", "Recorder", "RecorderMixin", "record"]

DEFAULT_MAX_BYTES = 2 * 2**30


def record(
    trainer: Trainer,
    path: str | Path,
    *,
    every: int = 1,
    max_bytes: int = DEFAULT_MAX_BYTES,
    text: bool = True,
) -> Recorder:
    """Record what `trainer` trains and evaluates on, from now until its training ends.

    Args:
        trainer: a `trl.GRPOTrainer` or `trl.RLOOTrainer`, or an instance of a subclass.
        path: the run file; the logged metrics go beside it. Both appear when the recorder closes. Where it is there
            already, as when a training is resumed, or somebody else records it, the recorder warns and takes the next
            free name, ``run.2.parquet``.
        every: record every Nth generated training batch. Evaluations and metrics are always recorded.
        max_bytes: about how large the files may get; recording stops with a warning where they would grow larger.
        text: keep prompts, responses, reference answers of the data set and the strings of the sampled token ids; False
            leaves all of them out.

    Returns:
        The recorder. It closes itself at the end of training and when the process exits; `close` it, or use it
        as a context manager, where there is no training or the file is wanted although training failed.

    Raises:
        UsageError: if this trainer cannot be recorded, or nothing can be written at `path`.
    """
    return Recorder(trainer, path, every=every, max_bytes=max_bytes, text=text)


class RecorderMixin:
    """`class MyTrainer(RecorderMixin, GRPOTrainer)`, or `RLOOTrainer`: a trainer that records itself.

    Args:
        record_path: the run file, as of `record`; by default ``run.parquet`` in the trainer's output directory.
        record_options: the other arguments of `record`.
    """

    recorder: Recorder

    def __init__(
        self,
        *args: object,
        record_path: str | Path | None = None,
        record_options: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        path = Path(trainer.args.output_dir) / "run.parquet" if record_path is None else record_path
        self.recorder = record(trainer, path, **(record_options or {}))
