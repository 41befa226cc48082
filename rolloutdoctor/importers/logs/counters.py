"""What counts the lines of a loop: steps that each epoch counts anew, and lines that something else counts."""

from collections.abc import Sequence
from dataclasses import replace

from rolloutdoctor.importers.logs.printed import Printed


def through_epochs(records: Sequence[Printed]) -> list[Printed]:
    """Return lines with steps that go on where a loop counts them anew in each epoch.

    >>> lines = [Printed({"epoch": epoch, "loss": 0.5}, step) for epoch in (1.0, 2.0) for step in (10, 20)]
    >>> [line.step for line in through_epochs(lines)]
    [10, 20, 30, 40]
    """
    found: list[Printed] = []
    before, last = 0, None
    for record in records:
        epoch = record.values.get("epoch")
        if record.step is None or epoch is None or epoch % 1:
            return list(records)
        if last is not None and record.step <= last[0] and epoch == last[1] + 1:
            before += last[0] + (record.step == 0)
        elif last is not None and epoch < last[1]:
            if record.step > last[0]:
                # Epochs of an update, which each step has anew.
                return list(records)
            before = 0
        last = record.step, epoch
        found.append(replace(record, step=before + record.step, total_steps=None) if before else record)
    return found


def of_one_counter(records: Sequence[Printed]) -> list[Printed]:
    """Return the records of what counts most of them, or counts as it does: a summary of an epoch is of no step."""
    steps: dict[str, set[int | None]] = {}
    for record in records:
        steps.setdefault(record.counter, set()).add(record.step)
    main = max(steps.values(), key=len, default=set())
    # Asked once for each counter: a log may have a line for each of a million steps.
    kept = {counter for counter, counted in steps.items() if 2 * len(counted & main) >= len(counted)}
    return [replace(record, counter="step") for record in records if record.counter in kept]
