"""RDO001: the last tokens of responses that reach the end of the context."""

import numpy as np
import pytest
from rules.checking import found_by, values, without

from rolloutdoctor.testing import toy_batch

CODE = "RDO001"
CONTEXT = 160


def steps(wrong, *, full=0.4, count=4, cap=CONTEXT, seed=0):
    """Prompts of 100 to 120 tokens; a share of the responses goes on to the end of the context.

    Args:
        wrong: whether a response reaches the end, its length and a position in it to the size of the gap in nats.
        full: that share.
        count: steps.
        cap: length of the context; 0: responses are capped at 50 tokens instead.
        seed: of all numbers.
    """
    found = []
    for step in range(count):
        draw = np.random.default_rng([seed, step])
        prompt, is_full = draw.integers(100, 121, 32), draw.random(32) < full
        length = np.where(is_full, (cap - prompt) if cap else 50, draw.integers(20, 36, 32))
        own, other = [], []
        for row in range(32):
            # The sampler thinks nothing likely, so that no token is one that it alone is sure of.
            log_prob = -1.0 - draw.gamma(1.0, 1.0, length[row])
            size = np.array([wrong(is_full[row], length[row], at) for at in range(length[row])])
            own.append(log_prob.tolist())
            other.append(np.minimum(log_prob + size * draw.normal(size=length[row]), 0).tolist())
        per_row = {"prompt_length": prompt.tolist(), "prompt_ids": list(range(1, 33))}
        found.append(toy_batch([[1, 0]] * 16, lengths=length.tolist(), policy=other, rollout=own, per_row=per_row,
                               step=step))  # fmt: skip
    return found


def drafted(is_full, length, at):
    """What vLLM did within the draft tokens of the end of its context."""
    return 2.0 if is_full and at >= length - 3 else 0.01


def test_the_last_tokens_are_off():
    found = found_by(CODE, steps(drafted), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert found.headline.startswith("the last tokens of ")
    assert "160 tokens, are " in found.headline
    assert 0.3 < values(found)["gap_context_end"] < 1.2
    assert "speculative decoding" in found.advice


@pytest.mark.parametrize(
    "batches",
    [
        steps(lambda is_full, length, at: 0.01),
        # The last tokens of every response, all of the long ones, and the end of those that have a cap of their own.
        steps(lambda is_full, length, at: 2.0 if at >= length - 3 else 0.01),
        steps(lambda is_full, length, at: 0.5 if is_full else 0.01),
        steps(lambda is_full, length, at: 2.0 if is_full and at >= length - 3 else 0.01, cap=0),
        # Three responses, and a gap that is none.
        steps(drafted, full=0.03),
        steps(lambda is_full, length, at: 0.02 if is_full and at >= length - 3 else 0.001),
        # Nothing says how long the context is.
        [without(one, "prompt_length") for one in steps(drafted)],
    ],
    ids=["healthy", "every end", "long ones", "own cap", "few", "small", "no prompts"],
)
def test_look_alikes(batches):
    found = found_by(CODE, batches, trainer=None)
    assert "gap_context_end" not in values(found)
    assert "reach the end of the context" not in found.message
