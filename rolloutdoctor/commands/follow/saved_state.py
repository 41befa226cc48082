"""The state of a check that goes on, in a file: what was counted, and what was said of it."""

import json
from dataclasses import dataclass, field, replace

from rolloutdoctor.engine.state_file import SavedState, read_members, saved_of
from rolloutdoctor.engine.stored import json_of, members_of, plain_of
from rolloutdoctor.io.archives import archived
from rolloutdoctor.results.errors import InputError

_FOLLOWED = "followed.json"


@dataclass
class Reported:
    """Last report of one finding.

    Attributes:
        severity: its label.
        verdict: ``confirmed``, ``exposed``, or ``gone``.
        since: number of steps counted when it was first seen to be less than was reported; None while it is not.
    """

    severity: str
    verdict: str
    since: int | None = None


@dataclass(frozen=True)
class Witness:
    """A step that was counted, by which a run is known again.

    Attributes:
        step: its number.
        split: its split.
        digest: of its rows.
    """

    step: int
    split: str
    digest: int


@dataclass
class Kept:
    """State from which an interrupted follow continues.

    Attributes:
        saved: the state of the check; None before the first step.
        told: code and cause of a finding to what was last reported of it.
        witnesses: the first step that was counted, and the last.
        signature: what the counts depend on, apart from the rows.
    """

    saved: SavedState | None = None
    told: dict[str, Reported] = field(default_factory=dict)
    witnesses: tuple[Witness, ...] = ()
    signature: str = ""

    def content(self) -> bytes:
        """Return the file: a saved state, and what only following needs."""
        assert self.saved is not None
        more = json_of(replace(self, saved=None)).encode()
        return archived(members_of(self.saved) | {_FOLLOWED: more})


def load(path: str) -> Kept:
    """Read a state that `check --follow --state` kept, or `check --save-state` wrote.

    Raises:
        InputError: if it cannot be read.
    """
    members = read_members(path)
    saved, more = saved_of(path, members), members.get(_FOLLOWED, b"{}")
    try:
        return replace(plain_of(Kept, json.loads(more)), saved=saved)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the state is damaged ({error}); remove it, and begin anew") from None
