"""RDI006: trained tokens that nobody sampled, and those that only look like it."""

import dataclasses
import math

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

NAN = math.nan
CODE = "RDI006"


def find(batch, **kwargs):
    return found_by(CODE, batch, **({"trainer": None} | kwargs))


def test_tool_output_in_the_loss():
    rollout = [[-1, NAN, NAN, NAN, -1], [-1, -1, -1, -1, -1]]
    found = find(toy_batch([[1, 0]], lengths=5, rollout=rollout, policy=-1.0), trainer="trl", loss_type="grpo")
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    value = values(found)
    assert value["unsampled_tokens"] == 3
    assert value["leaked_share"] == 0.3
    # Both rows weigh alike, and three of five tokens of one leak.
    assert value["leaked_gradient_share"] == pytest.approx(0.3)
    assert found.examples[0].note == "trained tokens: 3 without a log-prob of the sampler"


def test_masked_tool_output_is_fine():
    rollout = [[-1, NAN, NAN, NAN, -1], [-1, -1, -1, -1, -1]]
    assert find(toy_batch([[1, 0]], mask=[[1, 0, 0, 0, 1], [1] * 5], rollout=rollout)) is None


def test_a_row_without_any_log_prob_says_nothing():
    assert find(toy_batch([[1, 0]], rollout=[[NAN] * 4, [-1] * 4])) is None


def test_an_appended_last_token_is_information():
    found = find(toy_batch([[1, 0]], rollout=[[-1, -1, -1, NAN]] * 2))
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    assert "the trainer appended it" in found.message


@pytest.mark.parametrize(("low", "length", "fires"), [(-13, 3, True), (-13, 2, False), (-11, 3, False)])
def test_runs_that_no_model_writes(low, length, fires):
    policy = [[-1, *[low] * length, -1, -1, -1], [-1] * (4 + length)]
    found = find(toy_batch([[1, 0]], lengths=4 + length, policy=policy))
    assert (found is not None) == fires
    if fires:
        assert (found.severity.label, found.verdict) == ("warning", "exposed")
        assert values(found)["forced_tokens"] == length


def test_runs_do_not_cross_rows():
    assert find(toy_batch([[1, 0]], policy=[[-1, -1, -13, -13], [-13, -1, -1, -1]])) is None


def test_what_the_sampler_found_likely_it_wrote():
    policy = [[-1, -13, -13, -13], [-1] * 4]
    assert find(toy_batch([[1, 0]], policy=policy, rollout=-1.0)) is None
    assert find(toy_batch([[1, 0]], policy=policy, rollout=policy)).severity.label == "warning"


def padded(rows, mask=None, statuses=None, **kwargs):
    width = len(rows[0])
    batch = toy_batch(
        [[float(place % 2) for place in range(len(rows))]],
        mask=mask or [[1] * width] * len(rows),
        policy=None,
        per_token={"response_ids": rows},
        **kwargs,
    )
    return dataclasses.replace(batch, statuses=statuses or ["stop"] * len(rows))


def test_padding_with_the_end_token_is_trained():
    rows = [[5, 6, 2, 2, 2, 2], [7, 2, 2, 2, 2, 2], *[[5, 6, 7, 8, 9, 2]] * 8]
    found = find(padded(rows))
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    # Behind the first end: three of one row, four of the other.
    assert values(found)["tokens_after_end"] == 7
    assert values(found)["rows"] == 2
    masked = [[int(place <= row.index(2)) for place in range(6)] for row in rows]
    assert find(padded(rows, masked)) is None


def test_turns_behind_masked_tokens_are_no_leak():
    rows, mask = [[5, 2, 7, 2, 6, 2]] * 10, [[1, 1, 0, 0, 1, 1]] * 10
    (skipped,) = report_on(padded(rows, mask), trainer=None, select=[CODE]).skipped
    assert "no single token ends" in skipped.reason


def test_an_end_that_is_not_known():
    # Stop strings: every response ends otherwise.
    rows = [[5, 6, 7, 8, 9, place] for place in range(10)]
    (skipped,) = report_on(padded(rows), trainer=None, select=[CODE]).skipped
    assert "no single token ends" in skipped.reason
    (skipped,) = report_on(padded([[5, 2]] * 4), trainer=None, select=[CODE]).skipped
    assert "no trained token" in skipped.reason


def test_clean_and_skipped():
    assert outcomes(report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE])) == {CODE: "clean"}
    (skipped,) = report_on(toy_batch([[1, 0]], policy=None), trainer=None, select=[CODE]).skipped
    assert "no log-probs" in skipped.reason
