"""The state of a check that goes on, in a file: what was counted, and what was said of it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rolloutdoctor.engine.plain_values import built
from rolloutdoctor.engine.state_file import SavedState, dumped, load_state
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.results.errors import InputError

_MOST_BYTES = 2**30


@dataclass
class Told:
    """What was said of one finding.

    Attributes:
        severity: the word for it.
        verdict: ``confirmed``, ``exposed``, or ``gone``.
        since: number of steps counted when it was first seen to be less than was said; None while it is not.
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
    """What goes on where it was left.

    Attributes:
        saved: the state of the check; None before the first step.
        told: code and cause of a finding to what was said of it.
        witnesses: the first step that was counted, and the last.
        signature: what the counts depend on, apart from the rows.
    """

    saved: SavedState | None = None
    told: dict[str, Told] = field(default_factory=dict)
    witnesses: tuple[Witness, ...] = ()
    signature: str = ""

    def text(self) -> str:
        """Return the text of the file: that of a saved state, with what only following needs at its end."""
        assert self.saved is not None
        more = {
            "told": {key: asdict(one) for key, one in sorted(self.told.items())},
            "witnesses": [asdict(one) for one in self.witnesses],
            "signature": self.signature,
        }
        return dumped(self.saved).rstrip("\n")[:-1] + f',"follow":{json.dumps(more, sort_keys=True)}}}\n'


def load(path: str) -> Kept:
    """Read a state that `check --follow --state` kept, or `check --save-state` wrote.

    Raises:
        InputError: if it cannot be read.
    """
    saved = load_state(path)
    more: Mapping[str, Any] = json.loads(
        read_small(path, expected="name a state", most=_MOST_BYTES, error=InputError)
    ).get("follow", {})
    try:
        return Kept(
            saved,
            {str(key): built(Told, one) for key, one in more.get("told", {}).items()},
            tuple(built(Witness, one) for one in more.get("witnesses", [])),
            str(more.get("signature", "")),
        )
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise InputError(f"{path}: the state is damaged ({error}); remove it, and begin anew") from None
