"""The recording of a TRL trainer: what is hooked into it, and what is done with what the hooks see."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

from rolloutdoctor.io.metadata import of_ranks
from rolloutdoctor.io.write.recorded_rows import rows_table
from rolloutdoctor.io.write.writer import metrics_table
from rolloutdoctor.recorders._background import BackgroundWriter, close_at_exit, warn
from rolloutdoctor.recorders._trl_capture import Pass, Scoring, capture, ends_of, token_text
from rolloutdoctor.recorders._trl_config import Trainer, is_rloo, metadata_of
from rolloutdoctor.recorders._trl_steps import Steps
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

# An integer for each row, which goes through TRL's shuffling and splitting with the tensors of the batch.
ROW_KEY = "rolloutdoctor_row"

_REQUIRED = (
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


class Recorder:
    """A recording in progress; made by `record`.

    Attributes:
        path: where the run file will be.
        recording: True until it is closed or has stopped.
    """

    def __init__(self, trainer: Trainer, path: str | Path, *, every: int, max_bytes: int, text: bool) -> None:
        if every < 1:
            raise UsageError(f"every must be at least 1, not {every}")
        lacking = [name for name in _REQUIRED if not callable(getattr(trainer, name, None))]
        if lacking:
            raise UsageError(
                f"{type(trainer).__name__} cannot be recorded: it has no {', '.join(lacking)}; "
                "a trl.GRPOTrainer of release 1.3 or newer is expected, or a trl.RLOOTrainer of 1.10 or newer"
            )
        import trl

        self._trainer, self._text = trainer, text
        self._is_rloo = is_rloo(trainer)
        self._ends: frozenset[int] | None = None
        self._used_ids: set[int] = set()
        path = Path(path)
        rank = int(trainer.accelerator.process_index)
        world_size = int(trainer.accelerator.num_processes)
        if world_size > 1:
            path = path.with_name(f"{path.name.removesuffix('.parquet')}.rank{rank}.parquet")
        self._logs_here = rank == 0
        metadata = replace(metadata_of(trainer, trl.__version__), recording=of_ranks([rank], world_size))
        self._writer = BackgroundWriter(path, metadata, max_bytes=max_bytes)
        self.path = self._writer.path
        self._steps = Steps(every, int(getattr(trainer, "num_iterations", 1)), self._emit)
        self._scoring: Scoring | None = None
        self._tool_masks: Sequence[Sequence[int]] | None = None
        # What the forward passes gave: while a batch is generated and scored, and in the loss of a micro-batch.
        self._generating: list[tuple[Tensor, Tensor | None]] = []
        self._micro_batch_rows: list[int] | None = None
        self._forward: tuple[Tensor, Tensor | None] | None = None
        self.recording = True
        self._forget = close_at_exit(self.close)
        self._install()

    @property
    def journal_path(self) -> Path:
        """Return the path of the recording while it goes on."""
        return self._writer.journal_path

    def close(self) -> None:
        """Complete the files and leave the trainer as it was; does nothing the second time."""
        if not self.recording:
            return
        self._steps.end_evaluation()
        left_out = self._steps.step if self._steps.unfinished else None
        lost = self._finish()
        if left_out is not None:
            warn(
                f"rolloutdoctor left step {left_out} out of {self.path}: training ended before all rows of its "
                f"generated batch were trained on{lost}"
            )
        elif lost:
            warn(f"rolloutdoctor closed {self.path}{lost}")

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
            "_calculate_rewards": self._after("_calculate_rewards", self._on_rewards),
            "_generate_and_score_completions": self._around(
                "_generate_and_score_completions", self._before_generation, self._on_generation
            ),
            "_get_per_token_logps_and_entropies": self._after("_get_per_token_logps_and_entropies", self._on_forward),
            "_compute_loss": self._around("_compute_loss", self._before_loss, self._after_loss),
        }
        if hasattr(trainer, "_generate"):
            self._hooks["_generate"] = self._after("_generate", self._on_generated)
        # What another tool may have set on the instance before comes back on close.
        self._replaced = {name: vars(trainer)[name] for name in self._hooks if name in vars(trainer)}
        for name, hook in self._hooks.items():
            setattr(trainer, name, hook)
        _add_callback(trainer, self)

    def _after(self, name: str, look: Callable[[tuple[Any, ...], Any], None]) -> Callable[..., object]:
        original = getattr(self._trainer, name)

        @functools.wraps(original)
        def hook(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            self.guarded(look, (*args, *kwargs.values()), result)
            return result

        return hook

    def _around(
        self, name: str, before: Callable[[tuple[Any, ...]], None], after: Callable[[tuple[Any, ...], Any], None]
    ) -> Callable[..., object]:
        original = getattr(self._trainer, name)

        @functools.wraps(original)
        def hook(*args: object, **kwargs: object) -> object:
            values = (*args, *kwargs.values())
            self.guarded(before, values)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._micro_batch_rows, self._forward = None, None
                raise
            self.guarded(after, values, result)
            return result

        return hook

    def guarded(self, work: Callable[..., None], *args: object) -> None:
        """Do the recorder's own work; whatever goes wrong in it ends the recording, never the training."""
        if not self.recording:
            return
        problem = self._writer.failure
        try:
            if not problem:
                work(*args)
        except Exception as error:  # the boundary that keeps the recorder's faults out of the training
            problem = f"{type(error).__name__}: {error}"
        if problem:
            lost = self._finish()
            warn(f"rolloutdoctor stopped recording to {self.path}, and training goes on unchanged: {problem}{lost}")

    def _split(self) -> str:
        return "train" if self._trainer.model.training else "eval"

    def _on_generated(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a tuple that grew over time
        self._tool_masks = None if self._is_rloo else result[2]

    def _on_rewards(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a torch.Tensor
        inputs, prompts, completions, completion_ids = args[:4]
        self._scoring = Scoring(inputs, prompts, completions, completion_ids, result)

    def _before_generation(self, args: tuple[Any, ...]) -> None:
        self._generating.clear()

    def _on_generation(self, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401 - TRL's dict of tensors
        split = self._split()
        scoring, self._scoring = self._scoring, None
        forwards, self._generating[:] = list(self._generating), []
        named = self._steps.name_next(split, self._trainer.state.global_step)
        if named is None:
            return
        if scoring is None:
            raise RuntimeError("the trainer did not call _calculate_rewards")
        if self._ends is None:
            self._ends = ends_of(self._trainer)
        if self._text:
            self._used_ids.update(*scoring.completion_ids)
        tensors = {**output, **_rloo_log_probs(output, forwards)} if self._is_rloo else output
        generation = capture(
            self._trainer,
            tensors,
            scoring,
            self._tool_masks,
            name=named[0],
            number=named[1],
            split=split,
            text=self._text,
            ends=self._ends,
        )
        self._steps.begin(generation)
        output[ROW_KEY] = output["completion_ids"].new_tensor(list(range(len(generation))))

    def _on_forward(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a tuple that grew over time
        entropies = result[1]
        # Detached, so that no graph outlives its step.
        forward = result[0].detach(), None if entropies is None else entropies.detach()
        if self._micro_batch_rows is None:
            self._generating.append(forward)
        elif self._forward is None:
            self._forward = forward

    def _before_loss(self, args: tuple[Any, ...]) -> None:
        _, inputs = args[:2]
        rows = inputs.get(ROW_KEY)
        self._forward = None
        self._micro_batch_rows = None if rows is None else rows.tolist()

    def _after_loss(self, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401 - a torch.Tensor
        rows, forward = self._micro_batch_rows, self._forward
        self._micro_batch_rows, self._forward = None, None
        self._generating.clear()
        if rows is None:
            return
        if forward is None:
            raise RuntimeError("the loss did not call _get_per_token_logps_and_entropies")
        self._steps.add(self._split(), rows, forward, self._trainer.state.global_step)

    def on_step_end(self) -> None:
        """An optimizer step is done."""
        self._steps.end_step()

    def on_evaluate(self) -> None:
        """An evaluation is done."""
        self._steps.end_evaluation()

    def on_log(self, logs: Mapping[str, object]) -> None:
        """Keep the numbers that the trainer logs; those of an evaluation without their prefix."""
        if not self._logs_here:
            return
        # The summary at the end of training may come while the model is still in evaluation mode.
        split = "train" if "train_runtime" in logs else self._split()
        values: dict[str, float | None] = {}
        for name, value in logs.items():
            if name.startswith("rolloutdoctor/"):
                # Not the trainer's: what was found so far.
                continue
            if split == "eval":
                name = name.removeprefix("eval_")
            if value is None:
                values[name] = None
            # Asking for the protocol takes as long as all the rest of this, and most values are plain numbers.
            elif isinstance(value, (float, int)) or isinstance(value, SupportsFloat):  # noqa: SIM101 - in this order
                values[name] = float(value)
        step = self._trainer.state.global_step
        self._writer.put(functools.partial(metrics_table, step, split, values))

    def _emit(self, step: int, split: str, passes: Sequence[Pass]) -> None:
        self._writer.put(functools.partial(_rows, passes), (step, split))

    def _finish(self) -> str:
        """Complete the files with the steps that are whole, and take the hooks out; return what went wrong."""
        self.recording = False
        self._forget()
        for name, hook in self._hooks.items():
            # A hook that someone else has wrapped since stays: it does nothing any more.
            if vars(self._trainer).get(name) is hook:
                if name in self._replaced:
                    setattr(self._trainer, name, self._replaced[name])
                else:
                    delattr(self._trainer, name)
        lost = self._writer.close(token_text(self._trainer, self._used_ids))
        self.path = self._writer.path
        return lost


def _rows(passes: Sequence[Pass]) -> "pa.Table":
    return rows_table([each.columns() for each in passes])


def _rloo_log_probs(
    output: "Mapping[str, Tensor]", forwards: "Sequence[tuple[Tensor, Tensor | None]]"
) -> "dict[str, Tensor]":
    """Return what RLOOTrainer scores with but hands on summed: the policy's log-probs, then those of a reference.

    Raises:
        RuntimeError: if their sum is not what the trainer handed on, so that they are not what they seem.
    """
    if not 1 <= len(forwards) <= 2:
        raise RuntimeError(f"the trainer made {len(forwards)} forward passes over a generated batch, not one or two")
    old, *reference = (log_probs for log_probs, _ in forwards)
    if not ((old * output["completion_mask"]).sum(1) == output["old_logps"]).all():
        raise RuntimeError("the sums of the first forward pass are not the trainer's old_logps")
    return {"old_per_token_logps": old} | ({"ref_per_token_logps": reference[0]} if reference else {})


def _add_callback(trainer: Trainer, recorder: Recorder) -> None:
    from transformers import TrainerCallback

    class RecorderCallback(TrainerCallback):
        """Callback that passes on to the recorder what only callbacks receive."""

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            recorder.guarded(recorder.on_step_end)

        def on_evaluate(self, *args: object, **kwargs: object) -> None:
            recorder.guarded(recorder.on_evaluate)

        def on_log(self, *args: object, logs: Mapping[str, object] | None = None, **kwargs: object) -> None:
            recorder.guarded(recorder.on_log, logs or {})

        def on_train_end(self, *args: object, **kwargs: object) -> None:
            recorder.guarded(recorder.close)

    trainer.add_callback(RecorderCallback())  # type: ignore[attr-defined]
