"""Assignment of rows to optimizer steps: micro-batches into passes, passes into steps."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rolloutdoctor.recorders._trl_capture import Generation, Pass

if TYPE_CHECKING:
    from torch import Tensor

    Forward = tuple[Tensor, Tensor | None]

Emit = Callable[[int, str, Sequence[Pass]], None]


class Steps:
    """Puts what the loss sees together, and emits whole steps and whole evaluations.

    Args:
        every: emit every Nth step of training whose batch was generated; evaluations always.
        iterations: passes over each generated batch.
        emit: takes step, split and the passes of it.
    """

    def __init__(self, every: int, iterations: int, emit: Emit) -> None:
        self._every, self._iterations, self._emit = every, iterations, emit
        self._generated = {"train": 0, "eval": 0}
        self._counted_steps = 0
        self._generation_step: int | None = None
        self._wanted = True
        self._generation: dict[str, Generation] = {}
        # The passes of the optimizer step in progress, and the micro-batches counted in it so far.
        self._pass: Pass | None = None
        self.step: int | None = None
        self._passes: list[Pass] = []
        self._micro_batches = 0
        self._eval_step: int | None = None
        self._evaluated: list[Pass] = []

    @property
    def unfinished(self) -> bool:
        """True if rows of a training step wait for others of it."""
        return self._pass is not None or bool(self._passes)

    def name_next(self, split: str, done: int) -> tuple[str, int] | None:
        """Name and number the batch that was just generated; None if it is not one of every N.

        Args:
            split: ``train`` or ``eval``.
            done: optimizer steps that are done.

        Raises:
            RuntimeError: if the loss of the batch before went by unseen.
        """
        number = self._generated[split]
        self._generated[split] += 1
        before = self._generation.pop(split, None)
        if before is not None and not before.touched:
            raise RuntimeError(
                "the loss did not go through _compute_loss, so its log-probabilities are unknown "
                "(the Liger loss of older releases does that: set use_liger_kernel=False to record)"
            )
        if split == "eval":
            return f"eval-{number}", number
        if done != self._generation_step:
            # Batches of one optimizer step go together.
            self._generation_step = done
            self._wanted = self._counted_steps % self._every == 0
            self._counted_steps += 1
        return (str(number), number) if self._wanted else None

    def begin(self, generation: Generation) -> None:
        """Take the batch that micro-batches come from now."""
        self._generation[generation.split] = generation

    def add(self, split: str, rows: list[int], forward: "Forward", done: int) -> None:
        """Take one micro-batch: its rows, log-probs and entropies, and how many optimizer steps are done."""
        generation = self._generation[split]
        generation.touched = True
        if split == "eval":
            if done != self._eval_step:
                self.end_evaluation()
                self._eval_step = done
            evaluated = Pass(generation, done, number=generation.number)
            # Each batch of an evaluation has a loss of its own, as if it were a step.
            evaluated.add(rows, *forward, len(self._evaluated), len(self._evaluated))
            self._evaluated.append(evaluated)
            return
        current = self._pass
        if current is None or current.generation is not generation or not current.seen.isdisjoint(rows):
            current = self._begin_pass(generation, done + 1)
        current.add(rows, *forward, self._micro_batches, done + 1 - current.step)
        self._micro_batches += 1
        if current.complete:
            self._passes.append(current)
            self._pass = None

    def end_step(self) -> None:
        """Emit the optimizer step that just ended, if its generated batch was trained on to its end."""
        if self._pass is None:
            self._emit_step()

    def end_evaluation(self) -> None:
        """Emit the evaluation that just ended."""
        evaluated, self._evaluated = self._evaluated, []
        if evaluated:
            self._emit(evaluated[0].step, "eval", evaluated)
        self._eval_step = None

    def _begin_pass(self, generation: Generation, step: int) -> Pass:
        if step != self.step:
            self._emit_step()
            self.step, self._micro_batches = step, 0
            generation.passes = 0
        # Rows trained on twice before one optimizer step are two rows of that step.
        suffix = f"+{generation.passes}" if generation.passes else ""
        number = generation.number * self._iterations + generation.passes
        generation.passes += 1
        self._pass = Pass(generation, step, suffix, number)
        return self._pass

    def _emit_step(self) -> None:
        passes, self._passes = self._passes, []
        if passes:
            self._emit(passes[0].step, "train", passes)
