"""RDI006: trained tokens that nobody sampled, and those that only look like it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

NAN = math.nan
CODE = "RDI006"


def find(batch, **kwargs):
    """What is found in rows that say that no padding is trained."""
    said = {"trained_beyond": torch.zeros(len(batch), dtype=torch.int64), **batch.per_row}
    batch = dataclasses.replace(batch, per_row=said)
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
    assert "the trainer probably appended it" in found.message


@pytest.mark.parametrize(("low", "length", "fires"), [(-13, 3, True), (-13, 4, True), (-13, 2, False), (-11, 3, False)])
def test_runs_that_no_model_writes(low, length, fires):
    policy = [[-1, *[low] * length, -1, -1, -1], [-1] * (4 + length)]
    found = find(toy_batch([[1, 0]], lengths=4 + length, policy=policy))
    assert (found is not None) == fires
    if fires:
        assert (found.severity.label, found.verdict) == ("warning", "exposed")
        assert values(found)["forced_tokens"] == length


def test_tokens_beside_a_run_are_not_of_it():
    policy = [[-13, -1, -13, -13, -13, -1, -13, -13], [-1] * 8]
    assert values(find(toy_batch([[1, 0]], lengths=8, policy=policy)))["forced_tokens"] == 3


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


def test_a_last_turn_behind_masked_ones_is_no_leak():
    rows, mask = [[5, 2, 7, 2, 6, 2]] * 10, [[0, 0, 0, 0, 1, 1]] * 10
    assert find(padded(rows, mask)) is None


def test_an_end_that_is_not_known():
    # Stop strings: every response ends otherwise.
    rows = [[5, 6, 7, 8, 9, place] for place in range(10)]
    (skipped,) = report_on(padded(rows), trainer=None, select=[CODE]).skipped
    assert "no single token ends" in skipped.reason
    (skipped,) = report_on(padded([[5, 2]] * 4), trainer=None, select=[CODE]).skipped
    assert "no trained token" in skipped.reason


def test_padding_past_the_completion():
    batch = toy_batch([[1, 0], [1, 0]], lengths=[3, 5, 5, 4], per_row={"trained_beyond": [2, 0, -1, 1]})
    found = find(batch)
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert found.headline.startswith("3 tokens of padding past the completion in the loss")
    assert values(found)["tokens_beyond"] == 3
    assert values(found)["rows"] == 2
    assert found.examples[0].note == "trained tokens: 2 of padding past the completion"


def test_padding_that_a_file_cannot_hold_is_never_clean():
    said = toy_batch([[1, 0]], per_row={"trained_beyond": [0, 0]})
    assert outcomes(report_on(said, trainer=None, select=[CODE])) == {CODE: "clean"}
    for batch in (toy_batch([[1, 0]]), toy_batch([[1, 0]], per_row={"trained_beyond": [-1, -1]})):
        (skipped,) = report_on(batch, trainer=None, select=[CODE]).skipped
        assert "whether padding after them is trained" in skipped.reason
    # One more token would change the loss that is logged.
    loss = {"trainer": "trl", "scale_rewards": "none", "loss_type": "dapo", "select": [CODE]}
    for logged, end in ((-0.1, "clean"), (-0.05, "skipped")):
        batch = toy_batch([[1, 0]], lengths=[3, 2])
        assert outcomes(report_on(batch, logged={"loss": logged}, **loss)) == {CODE: end}


def zeros(*runs, old=-3.0, rows=8, length=30):
    """Rows of which the sampler gives some runs of tokens, each a start and an end, a log-prob of 0.0."""
    own = [[-0.5 - 0.01 * place for place in range(length)] for _ in range(rows)]
    policy = [list(each) for each in own]
    for start, end in runs:
        for row in range(rows):
            own[row][start:end], policy[row][start:end] = [0.0] * (end - start), [old] * (end - start)
    return toy_batch([[1.0, 0.0] * (rows // 2)], lengths=length, policy=policy, rollout=own)


def test_runs_of_zeros_are_masks():
    found = find(zeros((5, 12)))
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert values(found)["zero_tokens"] == 7 * 8
    # Placeholders stand alone or at the end, and of what a model is certain the other is nearly so.
    for batch in (zeros((5, 7)), zeros((25, 30)), zeros((5, 12), old=-0.3), zeros((3, 6), (10, 11), (20, 21))):
        assert outcomes(report_on(batch, trainer=None, select=[CODE])) == {CODE: "skipped"}


def test_clean_and_skipped():
    (skipped,) = report_on(toy_batch([[1, 0]], policy=None), trainer=None, select=[CODE]).skipped
    assert "no log-probs" in skipped.reason


def conversation(low=-6.0, groups=4, size=4, length=60, template=(91, 92, 93), at=20, mask=None, seed=0, **kwargs):
    """Groups of which all responses have a run of tokens at one place, the first of them unlikely."""
    draw = np.random.default_rng(seed)
    rows = groups * size
    ids = draw.integers(5, 50, (rows, length))
    own = -draw.gamma(0.5, 1.0, (rows, length))
    ids[:, at : at + len(template)] = template
    own[:, at : at + len(template)] = -0.01
    own[:, at] = low
    return toy_batch(
        [[1.0, 0.0] * (size // 2)] * groups,
        lengths=length,
        mask=mask,
        rollout=own.tolist(),
        per_token={"response_ids": ids.tolist()},
        **kwargs,
    )


def test_a_template_that_all_responses_of_a_group_have():
    # Two columns: 3 rows of 8 nats each, less log 60 each, and 1 for the places: 2 (24 - 4.1) - 1 = 38.8.
    one = conversation(low=-8.0)
    assert find(one) is None
    # One column of 3 rows of 15.1 nats each, less log 60 = 4.1 and 1 for the other places: 40.2.
    found = find(conversation(low=-15.1))
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert values(found)["common_tokens"] == 3 * 16
    assert "at one position" in found.headline
    # 14.9: 39.6.
    assert find(conversation(low=-14.9)) is None
    # In groups of sixteen rows each needs less.
    severe = find(conversation(low=-5.0, size=16))
    assert values(severe)["common_tokens"] == 3 * 64
    assert severe.examples[0].note == "trained tokens: 3 common to all responses of the group"


def test_the_last_place_of_a_group_is_not_the_first_of_the_next():
    batch = conversation(low=-15.1, at=59, template=(91,))
    before = values(find(batch))["common_tokens"]
    own = batch.column("rollout_log_probs").clone()
    own[::60] = -5.0
    assert (
        values(find(dataclasses.replace(batch, per_token={**batch.per_token, "rollout_log_probs": own})))[
            "common_tokens"
        ]
        == before
        == 16
    )


def test_common_tokens_that_are_no_leak():
    # Masked, or all but certain, or a prefix that all share, or in some rows only.
    masked = [[int(not 20 <= place < 23) for place in range(60)]] * 16
    assert find(conversation(low=-15.1, mask=masked)) is None
    assert find(conversation(low=-1.0)) is None
    assert find(conversation(low=-15.1, at=0)) is None
    batch = conversation(low=-15.1)
    ids = batch.column("response_ids").clone()
    ids[20::240] = 7
    assert find(dataclasses.replace(batch, per_token={**batch.per_token, "response_ids": ids})) is None


def test_siblings_with_one_seed_are_no_leak():
    batch = conversation(low=-15.1, at=50)
    ids, own = (batch.column(name).reshape(4, 4, 60).clone() for name in ("response_ids", "rollout_log_probs"))
    # They share 40 tokens of a nat each, and part for ten.
    ids[:, :, :40], own[:, :, :40] = ids[:, :1, :40], -1.0
    shared = {"response_ids": ids.reshape(-1), "rollout_log_probs": own.reshape(-1)}
    assert find(dataclasses.replace(batch, per_token={**batch.per_token, **shared})) is None


@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
def test_clean_groups_of_high_and_low_entropy_and_one_length(scale):
    draw = np.random.default_rng(1)
    # Every place has its own logits, whatever came before, as in a fixed form.
    logits = scale * draw.normal(size=(30, 40))
    own = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.stack([[draw.choice(40, p=np.exp(row)) for row in own] for _ in range(64)])
    rollout = own[np.arange(30), ids]
    batch = toy_batch([[1.0, 0.0]] * 32, lengths=30, rollout=rollout.tolist(), per_token={"response_ids": ids.tolist()})
    assert find(batch) is None


def test_zero_filled_masked_spans_are_clean():
    mask = [[int(not 20 <= place < 23) for place in range(60)]] * 16
    assert find(conversation(low=0.0, mask=mask)) is None


@pytest.mark.parametrize(("logged", "word"), [({}, "clean"), ({"loss": 0.3}, "skipped")])
def test_a_loss_that_nothing_explains_may_be_that_of_a_forgotten_mask(logged, word):
    """The recorder counts what the mask trains, and a term may leave the mask out."""
    batch = toy_batch(
        [[1, 0], [0, 1]], mask=[[1, 1, 1], [1, 1, 0]] * 2, policy=-1.0, per_row={"trained_beyond": [0] * 4}
    )
    report = report_on(batch, trainer="trl", logged=logged, select=[CODE, "RDG005"], scale_rewards="none")
    assert outcomes(report)[CODE] == word
