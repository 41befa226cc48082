"""What a recorder costs a training step of TRL's GRPO on the CPU, in two ways.

By difference: the same steps of two trainings in turn, of which one is recorded. Both draw the same random numbers,
step by step; a recorded step counts until its writer has nothing left to do, so that the thread's share is in it. And
by the clock of the processor inside the recorder's own code, hooks and thread, which is steadier and leaves out what
recording costs elsewhere. All in processor time, which other programs change less than the clock's.

Two trainings: the one that TRL's own tests run, a Qwen2 of hidden size 8 with its whole vocabulary and three
completions of at most eight tokens a step; and that of our tests, whose model has 14 words and costs nearly nothing.
"""

import statistics
import sys
import threading
import time
import warnings

from measure import HERE, Row

AS_TRL_TESTS = {
    "per_device_train_batch_size": 3,
    "num_generations": 3,
    "max_completion_length": 8,
    "gradient_accumulation_steps": 1,
    "beta": 0.0,
}
"""What TRL's tests/test_grpo_trainer.py sets in `test_train`."""


def trl_steps(quick, folder):
    """A recorded step against the same step unrecorded, and the recorder's own work against the step."""
    sys.path.insert(0, str(HERE.parents[1] / "recorders"))
    warnings.simplefilter("ignore")
    few = {"model": qwen2_of_trl_tests, **AS_TRL_TESTS}
    for name, steps, options in (("TRL's tests", 60, few), ("a model of 14 words", 300, {})):
        own, whole = inside(folder / f"{name}, own", steps // (6 if quick else 1), **options)
        what = f"in the recorder, of a step of {name}"
        yield Row(what, f"the step, {1000 * whole:.0f} ms", f"{1000 * own:.2f} ms, {100 * own / whole:.1f} %", "< 2 %")
    plain, recorded = in_turn(folder / "pairs", 40 if quick else 300)
    step, more = statistics.median(plain), statistics.median(b - a for a, b in zip(plain, recorded, strict=True))
    yield Row(
        f"a recorded step of {name}, {1000 * step:.0f} ms",
        "the same step unrecorded",
        f"+{1000 * more:.2f} ms, +{100 * more / step:.1f} %",
        "< +2 %",
    )


def inside(folder, steps, **options):
    """Processor seconds of a step in the recorder's own code, and of the whole step; the first ones warm up."""
    import numpy as np
    from transformers import TrainerCallback
    from trl_runs import make_trainer

    from rolloutdoctor.recorders._trl_recorder import Recorder
    from rolloutdoctor.recorders.trl import record

    folder.mkdir(parents=True)
    own, whole, hooks, guarded = [], [], [0.0], Recorder.guarded

    def timed(*args):
        began = time.thread_time()
        try:
            guarded(*args)
        finally:
            hooks[0] += time.thread_time() - began

    class Clock(TrainerCallback):
        """From the beginning of one step to that of the next, logs included."""

        def on_step_begin(self, *args, **kwargs):
            writer = recorder._writer
            writer._queue.join()
            own.append(hooks[0] + time.clock_gettime(time.pthread_getcpuclockid(writer._thread.ident)))
            whole.append(time.process_time())

    trainer = make_trainer(folder, steps=steps, **options)
    Recorder.guarded = timed
    try:
        recorder = record(trainer, folder / "run.parquet")
        trainer.add_callback(Clock())
        trainer.train()
    finally:
        Recorder.guarded = guarded
    return [statistics.median(np.diff(each)[steps // 10 :]) for each in (own, whole)]


def qwen2_of_trl_tests(folder):
    """The model of TRL's scripts/generate_tiny_models/for_causal_lm/qwen2_for_causal_lm_2_5.py, with fresh weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    words = 151_665
    shape = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=words, num_hidden_layers=2, **shape)).save_pretrained(folder / "model")
    return Qwen2ForCausalLM.from_pretrained(folder / "model", dtype="float32")


def in_turn(folder, steps, **options):
    """Seconds of each step, unrecorded and recorded, but for the first ones, where libraries warm up."""
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

    folder.mkdir(parents=True)
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
