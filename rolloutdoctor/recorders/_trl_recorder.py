"""The recording itself: what is hooked into the trainer, and which rows belong to which optimiser step."""

import atexit
import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

from rolloutdoctor.errors import UsageError
from rolloutdoctor.recorders._trl_capture import Columns, Generation, Pass, Scoring, capture, nbytes
from rolloutdoctor.recorders._trl_config import Trainer, metadata_of

if TYPE_CHECKING:
    from torch import Tensor

# An integer for each row, which goes through TRL's shuffling and splitting with the tensors of the batch.
ROW_KEY = "rolloutdoctor_row"

_REQUIRED = (
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)

_log = logging.getLogger(__name__)


class Recorder:
    """A recording in progress; made by `record`.

    Attributes:
        path: where the run file will be.
    """

    def __init__(self, trainer: Trainer, path: str | Path, *, every: int, max_bytes: int, text: bool) -> None:
        if every < 1:
            raise UsageError(f"every must be at least 1, not {every}")
        if any(kind.__name__ == "RLOOTrainer" for kind in type(trainer).__mro__):
            raise UsageError("an RLOOTrainer cannot be recorded yet; GRPOTrainer and its subclasses can")
        lacking = [name for name in _REQUIRED if not callable(getattr(trainer, name, None))]
        if lacking:
            raise UsageError(
                f"{type(trainer).__name__} cannot be recorded: it has no {', '.join(lacking)}; "
                "a trl.GRPOTrainer of release 1.3 or newer is expected"
            )
        import trl

        from rolloutdoctor.io.writer import MetricsWriter, RunWriter, metrics_path

        self._trainer = trainer
        self._every, self._max_bytes, self._text = every, max_bytes, text
        path = Path(path)
        rank = int(trainer.accelerator.process_index)
        self.path = path
        if trainer.accelerator.num_processes > 1:
            self.path = path.with_name(f"{path.name.removesuffix('.parquet')}.rank{rank}.parquet")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path.parent}: cannot be made ({error.strerror})") from error
        self._writer = RunWriter(self.path, metadata_of(trainer, trl.__version__))
        self._metrics = MetricsWriter(metrics_path(self.path)) if rank == 0 else None

        self._scoring: Scoring | None = None
        self._tool_masks: Sequence[Sequence[int]] | None = None
        self._generated = {"train": 0, "eval": 0}
        self._recorded_steps = 0
        self._generation_step: int | None = None
        self._wanted = True
        self._generation: dict[str, Generation] = {}
        # The rows of the optimiser step in progress, and the micro-batches counted in it so far.
        self._pass: Pass | None = None
        self._step: int | None = None
        self._rows: list[Columns] = []
        self._micro_batches = 0
        self._eval_step: int | None = None
        self._eval_batches = 0
        # Inside `_compute_loss`: the rows of the micro-batch, and what the policy's forward pass gave for them.
        self._micro_batch_rows: list[int] | None = None
        self._forward: tuple[Tensor, Tensor | None] | None = None

        self.recording = True
        atexit.register(self.close)
        self._install()

    def close(self) -> None:
        """Complete the files and leave the trainer as it was; does nothing the second time."""
        if not self.recording:
            return
        unfinished = self._pass is not None or bool(self._rows)
        lost = self._finish()
        if unfinished:
            _warn(
                f"rolloutdoctor left step {self._step} out of {self.path}: training ended before all rows of its "
                f"generated batch were trained on{lost}"
            )
        elif lost:
            _warn(f"rolloutdoctor closed {self.path}{lost}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Hooks. Each one runs the trainer's own method first and unchanged, then looks at what went in and came out.

    def _install(self) -> None:
        trainer = self._trainer
        self._hooks: dict[str, Callable[..., object]] = {
            "_calculate_rewards": self._after(trainer, "_calculate_rewards", self._on_rewards),
            "_generate_and_score_completions": self._after(
                trainer, "_generate_and_score_completions", self._on_generation
            ),
            "_get_per_token_logps_and_entropies": self._after(
                trainer, "_get_per_token_logps_and_entropies", self._on_forward
            ),
            "_compute_loss": self._around_loss(trainer),
        }
        if hasattr(trainer, "_generate"):
            self._hooks["_generate"] = self._after(trainer, "_generate", self._on_generated)
        # What another tool may have set on the instance before comes back on close.
        self._replaced = {name: vars(trainer)[name] for name in self._hooks if name in vars(trainer)}
        for name, hook in self._hooks.items():
            setattr(trainer, name, hook)
        _add_callback(trainer, self)

    def _after(
        self, trainer: Trainer, name: str, look: Callable[[tuple[Any, ...], Any], None]
    ) -> Callable[..., object]:
        original = getattr(trainer, name)

        @functools.wraps(original)
        def hook(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            self.guarded(look, (*args, *kwargs.values()), result)
            return result

        return hook

    def _around_loss(self, trainer: Trainer) -> Callable[..., object]:
        original = trainer._compute_loss  # type: ignore[attr-defined]

        @functools.wraps(original)
        def hook(*args: object, **kwargs: object) -> object:
            self.guarded(self._before_loss, (*args, *kwargs.values()))
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._micro_batch_rows, self._forward = None, None
                raise
            self.guarded(self._after_loss)
            return result

        return hook

    def guarded(self, work: Callable[..., None], *args: object) -> None:
        """Do the recorder's own work; whatever goes wrong in it ends the recording, never the training."""
        if not self.recording:
            return
        try:
            work(*args)
        except Exception as error:  # the boundary that keeps the recorder's faults out of the training
            lost = self._finish()
            _warn(
                f"rolloutdoctor stopped recording to {self.path}, and training goes on unchanged: "
                f"{type(error).__name__}: {error}{lost}"
            )

    def _split(self) -> str:
        return "train" if self._trainer.model.training else "eval"

    def _on_generated(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a tuple that grew over time
        self._tool_masks = result[2]

    def _on_rewards(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a torch.Tensor
        _, prompts, completions, completion_ids = args[:4]
        self._scoring = Scoring(prompts, completions, completion_ids, result)

    def _on_generation(self, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - TRL's dict of tensors
        split = self._split()
        scoring, self._scoring = self._scoring, None
        number = self._generated[split]
        self._generated[split] += 1
        before = self._generation.pop(split, None)
        if before is not None and not before.touched:
            raise RuntimeError(
                "the loss did not go through _compute_loss, so its log-probabilities are unknown "
                "(the Liger loss of older releases does that: set use_liger_kernel=False to record)"
            )
        if split == "train":
            self._choose()
            if not self._wanted:
                return
        if scoring is None:
            raise RuntimeError("the trainer did not call _calculate_rewards")
        generation = capture(
            self._trainer,
            output,
            scoring,
            self._tool_masks,
            name=str(number) if split == "train" else f"eval-{number}",
            split=split,
            text=self._text,
        )
        self._generation[split] = generation
        output[ROW_KEY] = output["completion_ids"].new_tensor(list(range(len(generation))))

    def _choose(self) -> None:
        """Decide whether the batch just generated is one of every N; batches of one optimiser step go together."""
        step = self._trainer.state.global_step + 1
        if step != self._generation_step:
            self._generation_step = step
            self._wanted = self._recorded_steps % self._every == 0
            self._recorded_steps += 1

    def _on_forward(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a tuple that grew over time
        if self._micro_batch_rows is not None and self._forward is None:
            entropies = result[1]
            # Detached, so that no graph outlives its step.
            self._forward = (result[0].detach(), None if entropies is None else entropies.detach())

    def _before_loss(self, args: tuple[Any, ...]) -> None:
        _, inputs = args[:2]
        rows = inputs.get(ROW_KEY)
        self._forward = None
        self._micro_batch_rows = None if rows is None else rows.tolist()

    def _after_loss(self) -> None:
        rows, forward = self._micro_batch_rows, self._forward
        self._micro_batch_rows, self._forward = None, None
        if rows is None:
            return
        if forward is None:
            raise RuntimeError("the loss did not call _get_per_token_logps_and_entropies")
        split = self._split()
        generation = self._generation[split]
        generation.touched = True
        done = self._trainer.state.global_step
        if split == "eval":
            if done != self._eval_step:
                self._eval_step, self._eval_batches = done, 0
            evaluated = Pass(generation, done)
            # Each batch of an evaluation has a loss of its own, as if it were a step.
            evaluated.add(rows, *forward, self._eval_batches, self._eval_batches)
            self._eval_batches += 1
            self._write([evaluated.columns()])
            return
        current = self._pass
        if current is None or current.generation is not generation or not current.found.keys().isdisjoint(rows):
            current = self._begin_pass(generation, done + 1)
        current.add(rows, *forward, self._micro_batches, done + 1 - current.step)
        self._micro_batches += 1
        if current.complete:
            self._rows.append(current.columns())
            self._pass = None

    def _begin_pass(self, generation: Generation, step: int) -> Pass:
        if step != self._step:
            self._write_step()
            self._step, self._micro_batches = step, 0
            generation.passes = 0
        # Rows trained on twice before one optimiser step are two rows of that step.
        suffix = f"+{generation.passes}" if generation.passes else ""
        generation.passes += 1
        self._pass = Pass(generation, step, suffix)
        return self._pass

    def on_step_end(self) -> None:
        """Write the rows of the optimiser step that just ended, if its generated batch was trained on to its end."""
        if self._pass is None:
            self._write_step()

    def on_log(self, logs: Mapping[str, object]) -> None:
        """Keep the numbers that the trainer logs; those of an evaluation without their prefix."""
        if self._metrics is None:
            return
        # The summary at the end of training may come while the model is still in evaluation mode.
        split = "train" if "train_runtime" in logs else self._split()
        values: dict[str, float | None] = {}
        for name, value in logs.items():
            if split == "eval":
                name = name.removeprefix("eval_")
            if value is None:
                values[name] = None
            elif isinstance(value, SupportsFloat):
                values[name] = float(value)
        self._metrics.write(self._trainer.state.global_step, split, values)

    def _write_step(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._write(rows)

    def _write(self, batches: list[Columns]) -> None:
        """Write rows that belong together, or none of them."""
        size = self._writer.size + (self._metrics.size if self._metrics else 0)
        if size + sum(map(nbytes, batches)) > self._max_bytes:
            lost = self._finish()
            _warn(
                f"rolloutdoctor stopped recording to {self.path} at step {batches[0]['step'][0]}: max_bytes="
                f"{self._max_bytes} is reached; training goes on unchanged{lost}"
            )
            return
        for columns in batches:
            self._writer.write(columns)

    def _finish(self) -> str:
        """Complete the files with the steps that are whole, and take the hooks out; return what went wrong."""
        self.recording = False
        lost = ""
        atexit.unregister(self.close)
        for name, hook in self._hooks.items():
            # A hook that someone else has wrapped since stays: it does nothing any more.
            if vars(self._trainer).get(name) is hook:
                if name in self._replaced:
                    setattr(self._trainer, name, self._replaced[name])
                else:
                    delattr(self._trainer, name)
        for writer in (self._writer, self._metrics):
            if writer is None:
                continue
            try:
                # A file without rows would only replace an older one.
                writer.close() if writer.rows else writer.abort()
            except Exception as error:  # the same boundary as in `guarded`
                lost += f"; {writer.path} could not be completed: {type(error).__name__}: {error}"
        return lost


def _add_callback(trainer: Trainer, recorder: Recorder) -> None:
    from transformers import TrainerCallback

    class RecorderCallback(TrainerCallback):
        """Tells the recorder what only callbacks are told."""

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            recorder.guarded(recorder.on_step_end)

        def on_log(self, *args: object, logs: Mapping[str, object] | None = None, **kwargs: object) -> None:
            recorder.guarded(recorder.on_log, logs or {})

        def on_train_end(self, *args: object, **kwargs: object) -> None:
            recorder.guarded(recorder.close)

    trainer.add_callback(RecorderCallback())  # type: ignore[attr-defined]


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Warning:
        # Where warnings are errors, one of ours must not stop a training either.
        _log.warning(message)
