"""What rows of a trajectory begin with: against a slow comparison of every pair."""

import numpy as np
import pytest

from rolloutdoctor.ops import kept_contexts
from rolloutdoctor.ops.context_kinds import CONTINUED, FIRST, NEW, REWRITTEN, SAME, UNKNOWN
from rolloutdoctor.ops.kept_contexts import compared_contexts


def packed(rows):
    return np.array([one for row in rows for one in row], np.int64), np.array([len(row) for row in rows], np.int64)


def compared(prompts, responses, owners):
    found = compared_contexts(packed(prompts), packed(responses), np.array(owners, np.int64))
    return list(zip(*(each.tolist() for each in found), strict=True))


def slow(prompts, responses, owners):
    """The same, row by row."""
    found = []
    for row, (prompt, response, owner) in enumerate(zip(prompts, responses, owners, strict=True)):
        earlier = [other for other in range(row) if owners[other] == owner] if owner >= 0 else []
        whole = [*prompt, *response]
        begun = [other for other in earlier if prompts[other] and whole[: len(prompts[other])] == prompts[other]]
        kind, kept, of = (UNKNOWN if owner < 0 else NEW if earlier else FIRST), 0, 0
        shorter = [other for other in begun if len(prompts[other]) < len(prompt)]
        wholes = [[*prompts[other], *responses[other]] for other in earlier]
        if any(each and whole[: len(each)] == each for each in wholes):
            kind = CONTINUED
        elif any(prompts[other] == prompt for other in begun):
            kind = SAME
        elif shorter:
            kind, nearest = REWRITTEN, max(shorter, key=lambda other: (len(prompts[other]), other))
            of = len(responses[nearest])
            rest = whole[len(prompts[nearest]) :]
            pairs = zip(rest, responses[nearest], strict=False)
            kept = next((place for place, (one, other) in enumerate(pairs) if one != other), min(of, len(rest)))
        found.append((kind, kept, of))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_as_a_slow_comparison_has_it(seed):
    draw = np.random.default_rng(seed)
    prompts, responses, owners = [], [], []
    for _ in range(int(draw.integers(1, 25))):
        # Of two ids, so that many contexts agree, and some of them are earlier ones that go on.
        base = (
            [*prompts[at], *responses[at]]
            if prompts and draw.random() < 0.6 and (at := int(draw.integers(len(prompts)))) >= 0
            else []
        )
        base = base[: int(draw.integers(len(base) + 1))] if draw.random() < 0.4 else base
        prompts.append([*base, *draw.integers(0, 2, int(draw.integers(0, 3))).tolist()])
        responses.append(draw.integers(0, 2, int(draw.integers(0, 4))).tolist())
        owners.append(int(draw.integers(-1, 3)))
    assert compared(prompts, responses, owners) == slow(prompts, responses, owners)


def test_too_many_rows_are_not_compared(monkeypatch):
    monkeypatch.setattr(kept_contexts, "MOST", 3)
    found = compared([[1]] * 7, [[2]] * 7, [0, 0, 0, 0, 1, 1, 1])
    assert [kind for kind, _, _ in found] == [UNKNOWN] * 4 + [FIRST, CONTINUED, CONTINUED]
