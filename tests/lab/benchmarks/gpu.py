"""The evaluation on a GPU: against copying on it, against the CPU, and against the trainers' own functions on it.

Nothing is measured where there is no CUDA device.
"""

from dataclasses import replace

import torch
from generate import write_run
from measure import Row, interleaved, ratio
from upstream import OPTIONS, objective_of, ours_on, ragged_batch, theirs_on, verl_on

VERL = {"adv_estimator": "grpo", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.001}


def evaluation(quick, folder):
    """Resident data, then whole checks, then TRL's and verl's losses."""
    if not torch.cuda.is_available():
        return
    yield from resident("cuda", quick)
    yield from checks(quick, folder)
    yield from losses("cuda", quick)


def waiting(work):
    """The same work, done when it returns."""

    def done():
        found = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return found

    return done


def column_bytes(batch, objective):
    """Bytes of the token columns that an evaluation looks at, each once."""
    from rolloutdoctor.objective.required_columns import loss_columns

    stored = {batch.stored_name(name) for name in loss_columns(objective)} & set(batch.per_token)
    return sum(batch.column(name).nbytes for name in stored)


def resident(device, quick):
    """Columns that are on the device: tokens a second, and bytes a second against those of a copy on it."""
    rows, repeats = (8_192, 5) if quick else (131_072, 9)
    batch = ragged_batch(rows).to(device)
    source = torch.empty(batch.tokens, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    for trainer, options in (("trl", OPTIONS), ("verl", VERL)):
        objective = objective_of(trainer, options)
        ours = waiting(ours_on(batch, trainer, options))
        copy = waiting(lambda: target.copy_(source))
        ours(), copy()
        seconds, copied = interleaved(repeats, ours, copy)
        # A copy reads and writes; the evaluation reads.
        share = (column_bytes(batch, objective) / seconds) / (2 * source.nbytes / copied)
        what = f"{trainer}'s objective on the GPU, {batch.tokens / 1e6:.1f} M resident tokens"
        yield ratio(f"{what}: bytes a second", "a copy on the device, read and written", share, "")
        yield Row(f"{what}: tokens a second", "", f"{batch.tokens / seconds / 1e6:,.0f} M", "")


def checks(quick, folder):
    """A full check of one file on either device."""
    from rolloutdoctor.engine.check import check
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.run import open_run

    tokens, repeats = (8_000_000, 3) if quick else (60_000_000, 5)
    path = folder / "run.parquet"
    exact = write_run(path, tokens=tokens)
    sides = [lambda device=device: check(open_run([path]), CheckOptions(device=device)) for device in ("cpu", "cuda")]
    sides[1]()
    slow, fast = interleaved(repeats, *sides)
    what = f"`check` on the CPU, {exact / 1e6:.1f} M tokens, warm"
    yield ratio(what, "`check` on the GPU, its first step on both", slow / fast, "")


def losses(device, quick):
    """The trainers' loss, KL and gradient by autograd on padded tensors, against ours, on one device."""
    rows, repeats = (2_048, 3) if quick else (8_192, 5)
    batch = ragged_batch(rows).to(device)
    for trainer, options, theirs_of in (("trl", OPTIONS, theirs_on), ("verl", VERL, verl_on)):
        theirs, ours = waiting(theirs_of(batch)), waiting(ours_on(replace(batch), trainer, options))
        assert abs(theirs() - ours()) < 1e-5
        slow, fast = interleaved(repeats, theirs, ours)
        what = f"{trainer}'s loss, KL and gradient by autograd on the GPU, {batch.tokens / 1e6:.1f} M tokens"
        yield ratio(what, "ours", slow / fast, "")
