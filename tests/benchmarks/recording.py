"""What a recorder costs: the same steps of two trainings in turn, of which one is recorded.

The training is the tiny one of the tests, on the CPU; both trainings draw the same random numbers, step by step. A
recorded step counts until its writer has nothing left to do, so that the thread's share is in it, and in processor time
of the whole process, which other programs change less than the clock's.
"""

import statistics
import sys
import threading
import time
import warnings

from measure import HERE, Row


def trl_steps(quick, folder):
    """A recorded step of TRL's GRPO against the same step unrecorded."""
    plain, recorded = in_turn(folder, 40 if quick else 300)
    step, more = statistics.median(plain), statistics.median(b - a for a, b in zip(plain, recorded, strict=True))
    yield Row(
        f"a recorded step of TRL on the CPU, {1000 * step:.0f} ms",
        "the same step unrecorded",
        f"+{1000 * more:.2f} ms, +{100 * more / step:.1f} %",
        "< +2 %",
    )


def in_turn(folder, steps, **options):
    """Seconds of each step, unrecorded and recorded, but for the first ones, where libraries warm up."""
    sys.path.insert(0, str(HERE.parent / "recorders"))
    warnings.simplefilter("ignore")
    turns, seconds = Turns(), {False: [], True: []}
    trainings = [training(folder / str(recorded), steps, recorded, turns, seconds, options) for recorded in seconds]
    threads = [threading.Thread(target=each, daemon=True) for each in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each[steps // 10 :] for each in seconds.values()]


class Turns:
    """Lets two threads go on in turn, and the one that is left alone."""

    def __init__(self):
        self._changed, self._next = threading.Condition(), False
        self._here = {False, True}

    def take(self, mine):
        with self._changed:
            self._changed.wait_for(lambda: self._next is mine)

    def give(self, mine, leave=False):
        with self._changed:
            self._here -= {mine} if leave else set()
            if (not mine) in self._here:
                self._next = not mine
            self._changed.notify_all()


def training(folder, steps, recorded, turns, seconds, options):
    """Prepare a training here; what comes back runs it."""
    import torch
    from transformers import TrainerCallback
    from trl_runs import make_trainer

    from rolloutdoctor.recorders.trl import record

    folder.mkdir()
    trainer = make_trainer(folder, steps=steps, **options)
    recorder = record(trainer, folder / "run.parquet") if recorded else None
    began = []

    class Clock(TrainerCallback):
        """From the beginning of one step to that of the next, logs included."""

        def on_step_begin(self, *args, **kwargs):
            if recorder is not None:
                recorder._writer._queue.join()
            if began:
                seconds[recorded].append(time.process_time() - began.pop())
            numbers = torch.get_rng_state()
            turns.give(recorded)
            turns.take(recorded)
            torch.set_rng_state(numbers)
            began.append(time.process_time())

    def run():
        turns.take(recorded)
        try:
            torch.manual_seed(0)
            trainer.train()
        finally:
            turns.give(recorded, leave=True)

    trainer.add_callback(Clock())
    return run
