"""RDG010: whether rejection masked a token is told from the two masks, where a run has both."""

import pytest

from rolloutdoctor.testing import diagnose_one, toy_batch

MASK = [[1, 1, 1], [0, 0], [1, 1], [1, 0]]


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    ("before", "said"),
    [
        (MASK, "RDG010 not applicable: no token was masked by rejection"),
        ([[1, 1, 1], [1, 1], [1, 1], [1, 1]], "RDG010 error confirmed: values_compared 1"),
        # A run without the mask from before the rejection may have dropped tokens.
        (None, "RDG010 skipped: the logged actor/pg_loss disagrees with the rows"),
    ],
)
def test_a_token_was_dropped(before, said):
    batch = toy_batch([[1, 0], [0, 1]], mask=MASK, per_token={} if before is None else {"response_mask_pre": before})
    logged = {"actor/pg_loss": -0.157134618}
    assert diagnose_one("RDG010", batch, trainer="verl", adv_estimator="grpo", logged=logged).startswith(said)
