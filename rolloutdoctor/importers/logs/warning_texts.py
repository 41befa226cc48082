"""Numbers that a trainer says in its warnings alone: a console may have nothing else."""

import re
from collections.abc import Iterable, Iterator

from rolloutdoctor.importers.logs.printed import NUMBER, Printed, number

_NEGATIVE_KL = re.compile(rf"KL divergence is starting to become negative: ({NUMBER})(?=\s)")


class Warnings:
    """``KL divergence is starting to become negative: -9.78`` of TRL's PPO trainer before 0.12, `record_step_stats`."""

    title = "warnings of TRL's PPO trainer"
    remarks = ("read are warnings alone, which are of the updates with a KL below -1: other updates are not there",)

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the KL of each warning."""
        for line in lines:
            found = _NEGATIVE_KL.search(line) if "KL divergence" in line else None
            if found is not None:
                yield Printed({"objective/kl": number(found[1])})
