"""RDI009: copies that no sampler makes by chance, and those that it does."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

LENGTH = 8


def batch_of(groups, *, nats=2.0, prompts=None, step=0, column="rollout_log_probs", **per_row):
    """A batch of groups of responses, each a letter that stands for eight tokens, with `nats` a token."""
    count = sum(map(len, groups))
    ids = [[ord(letter) * 10 + place for place in range(LENGTH)] for group in groups for letter in group]
    rows = {
        "prompt": [group + 1 if prompts is None else prompts[group] for group, each in enumerate(groups) for _ in each]
    }
    logps = [[-nats] * LENGTH] * count if isinstance(nats, float) else [[-each] * LENGTH for each in nats]
    return toy_batch(
        [[float(row % 2) for row, _ in enumerate(group)] for group in groups],
        lengths=LENGTH,
        policy=None if column != "policy_log_probs" else logps,
        per_row=rows | per_row,
        per_token={"response_ids": ids} | ({column: logps} if column not in (None, "policy_log_probs") else {}),
        step=step,
    )


def find(*batches):
    return found_by("RDI009", list(batches), trainer=None)


def test_a_seed_that_every_request_of_a_group_has():
    # One group repeats itself, the other does not: sampling was on.
    found = find(batch_of(["aaaa", "bcde"], nats=9.0))
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    value = values(found)
    assert value["impossible_copies"] == value["copies"] == 3
    assert value["effective_group_size"] == 2.5
    assert value["groups_alike"] == 1
    # The whole variance of one group of two.
    assert value["reward_variance_lost"] == pytest.approx(0.5)
    assert "every request of a group has the same seed" in found.message
    assert found.examples[0].note == "the same response as r1"


def test_a_few_copies_among_many_rows():
    found = find(batch_of(["aabcdefg", "hijklmno"], nats=9.0))
    assert found.severity.label == "error"
    assert values(found)["impossible_copies"] == 1
    # Counts 2, 1, 1, 1, 1, 1, 1 of 8: squares add up to 10.
    lost = 1 - (1 - 10 / 64) / (1 - 1 / 8)
    assert values(found)["reward_variance_lost"] == pytest.approx(lost / 2)


def test_temperature_0_looks_like_a_seed():
    found = find(batch_of(["aaaa", "bbbb"], nats=9.0))
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert "temperature 0" in found.message


def test_ranks_with_the_same_seed():
    groups, ranks = ["abcd", "abcd"], [0] * 4 + [1] * 4
    found = find(batch_of(groups, nats=9.0, prompts=[1, 1], rank=ranks))
    assert values(found)["impossible_copies_in_other_groups"] == 4
    assert values(found)["impossible_copies"] == 0
    assert "ranks sample with the same seed" in found.message
    found = find(batch_of(groups, nats=9.0))
    assert "rows were mixed up" in found.message


@pytest.mark.parametrize("groups", [["aaaa", "bcde"], ["abcd", "abcd"]])
def test_likely_answers_repeat(groups):
    # Four nats in all: short or certain answers, and a chance of two in a hundred.
    report = report_on(batch_of(groups, nats=0.5), trainer=None, select=["RDI009"])
    assert [one.severity.label for one in report.findings] in ([], ["info"])
    # Responses that may all come twice say nothing of a seed.
    assert report.findings or "copies of them may be chance" in report.skipped[0].reason


def test_several_copies_are_less_likely_than_one():
    """Of eight tokens with three nats each: 24 nats a response, and 56 pairs."""
    assert find(batch_of(["aabcdefg", "hijklmno"], nats=3.0)) is None
    found = find(batch_of(["aabbccdd", "hijklmno"], nats=3.0))
    assert found.severity.label == "error"
    assert values(found)["impossible_copies"] == 4
    # What the log-probs are wrong about by half, as at another temperature, is no error.
    assert find(batch_of(["aabbccdd", "hijklmno"], nats=2.0)).severity.label == "info"


def test_collapse_is_information():
    found = find(batch_of(["aaaa", "bbbc"], nats=0.01))
    assert found.severity.label == "info"
    value = values(found)
    assert value["copies"] == 5
    prob = math.exp(-LENGTH * 0.01)
    # Beyond the first of each response: 4 p - (1 - (1 - p)^4) for each of 4 p rows.
    share = (4 * prob - (1 - (1 - prob) ** 4)) / (4 * prob)
    assert value["copies_expected"] == pytest.approx(8 * share)


def test_the_bound_grows_with_the_pairs():
    # 32 nats are beyond 30 + ln(6), and not beyond 30 + ln(496).
    few, many = ["aabc"], ["aabc", *("".join(chr(100 + group * 4 + row) for row in range(4)) for group in range(7))]
    assert find(batch_of(few, nats=4.0)).severity.label in ("warning", "error")
    assert find(batch_of(many, nats=4.0)) is None


def test_masked_tokens_do_not_make_a_response_unlikely():
    batch = batch_of(["aabc"], nats=9.0)
    batch.token_columns._put("response_mask", (torch.arange(4 * LENGTH) % LENGTH < 1,))
    found = find(batch)
    assert found is None or found.severity.label == "info"


def steps(nats, again, column="rollout_log_probs"):
    first = batch_of(["abcd"], nats=nats, column=column)
    return [first, batch_of(["aefg"], nats=[again, nats, nats, nats], step=1, column=column)]


def test_the_same_response_in_another_step():
    found = find(*steps(9.0, 9.5))
    assert found.severity.label == "warning"
    assert values(found)["resampled_responses"] == 1
    # The same log-probs: the same sample.
    found = find(*steps(9.0, 9.0))
    assert found.severity.label == "info"
    assert values(found)["replayed_responses"] == 1
    # The trainer's log-probs of one sample change with the weights.
    assert find(*steps(9.0, 9.5, "old_log_probs")).severity.label == "info"
    # Likely ones may recur.
    assert outcomes(report_on(steps(0.2, 0.3), trainer=None, select=["RDI009"])) == {"RDI009": "skipped"}


def test_another_prompt_is_another_context():
    first, second = steps(9.0, 9.5)
    second.per_row["prompt"][:] = 7
    assert find(first, second) is None


def test_clean_and_skipped():
    assert outcomes(report_on(batch_of(["abcd"]), trainer=None, select=["RDI009"])) == {"RDI009": "clean"}
    (skipped,) = report_on(toy_batch([[1, 0]]), trainer=None, select=["RDI009"]).skipped
    assert "response_ids" in skipped.reason
    (skipped,) = report_on(batch_of(["a", "a"]), trainer=None, select=["RDI009"]).skipped
    assert "no group has two responses" in skipped.reason
    # Copies, and nothing that says how likely they are.
    many = batch_of(["aabcdefg"], column=None)
    (skipped,) = report_on(many, trainer=None, select=["RDI009"]).skipped
    assert "without log-probs its probability is unknown" in skipped.reason
    found = find(batch_of(["aaab"], column=None))
    assert found.severity.label == "info"
    assert "without log-probs" in found.evidence


def test_text_does_as_well():
    batch = toy_batch([[1, 0, 1]], per_row={"response": [5, 5, 6]}, lengths=8, policy=-9.0)
    assert values(find(batch))["impossible_copies"] == 1


def test_texts_of_a_step_without_tokens_beside_one_with_some():
    texts = [
        toy_batch([[1, 0, 1]], per_row={"response": [5, 5, 5]}, lengths=lengths, policy=None, step=step)
        for step, lengths in enumerate([[8, 0, 8], [0, 0, 0]])
    ]
    # A row without a token is empty where others have some.
    assert [values(find(each))["copies"] for each in texts] == [1, 2]
    assert values(find(*texts))["copies"] == 3


def test_responses_of_which_nothing_is_known_are_no_copies():
    batch = toy_batch([[1, 0, 1, 0]], per_row={"response": [5, 0, 0, 6]}, lengths=8, policy=-9.0)
    assert find(batch) is None
    batch.per_row["response"][:] = torch.tensor([5, 5, 0, 0])
    assert values(find(batch))["copies"] == 1


def test_a_sample_of_a_long_run_is_the_same_in_any_order():
    letters = "".join(map(chr, range(100, 400)))
    batches = [batch_of([letters], nats=9.0 + step, step=step) for step in range(3)]
    report = report_on(batches, trainer=None, select=["RDI009"])
    assert values(report.findings[0])["resampled_responses"] == 256
    assert repr(report_on(batches[::-1], trainer=None, select=["RDI009"])) == repr(report)


def branched(share, *, groups=4, size=4, length=100, nats=1.0, seed=0, step=0, alike=False, shift=0.0, **per_row):
    """Groups of which a pair, or all rows, begin with the same tokens."""
    draw = np.random.default_rng([seed, 0])
    ids = draw.integers(5, 5000, (groups, size, length))
    ids[:, :, share:] = np.random.default_rng([seed, 1, step]).integers(5, 5000, (groups, size, length - share))
    ids[:, : size if alike else 2, :share] = ids[:, :1, :share]
    prompts = np.arange(1, groups + 1).repeat(size).tolist()
    return toy_batch(
        [[1.0, 0.0] * (size // 2)] * groups,
        lengths=length,
        policy=None,
        rollout=-(nats + shift),
        per_row={"prompt": prompts, **per_row},
        per_token={"response_ids": ids.reshape(-1, length).tolist()},
        step=step,
    )


def test_a_prefix_that_two_responses_share():
    # 64 tokens of a nat each are above 50; 32 are not.
    found = find(branched(70))
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert (value["impossible_prefixes"], value["longest_prefix"], value["impossible_copies"]) == (4, 64, 0)
    assert found.examples[0].note == "begins like another response to its prompt"
    assert find(branched(40)) is None
    severe = find(branched(99, alike=True))
    assert values(severe)["impossible_prefixes"] == 12
    assert "temperature 0" in severe.message


def test_prefixes_that_chance_or_the_task_explains():
    # A policy that has collapsed, and a beginning that was forced on all prompts.
    assert find(branched(99, nats=0.4)) is None
    batch = branched(70, alike=True)
    ids = batch.column("response_ids").reshape(16, 100).clone()
    ids[:, :70] = ids[0, :70]
    forced = dataclasses.replace(batch, per_token={**batch.per_token, "response_ids": ids.reshape(-1)})
    assert find(forced) is None
    masked = [[int(place >= 70) for place in range(100)]] * 16
    mask = torch.tensor(masked).reshape(-1).bool()
    assert find(dataclasses.replace(batch, per_token={**batch.per_token, "response_mask": mask})) is None


def test_a_seed_that_ranks_share_for_a_prompt():
    batch = branched(70, groups=2, size=2)
    ids = batch.column("response_ids").reshape(4, 100).clone()
    ids[1, :70] = torch.arange(70) + 6000
    ids[2:, :70] = ids[:2, :70]
    batch = dataclasses.replace(
        batch,
        per_row={**batch.per_row, "prompt": torch.ones(4, dtype=torch.long)},
        per_token={**batch.per_token, "response_ids": ids.reshape(-1)},
    )
    found = find(batch)
    assert values(found)["impossible_prefixes_in_other_groups"] == 2
    assert values(found)["impossible_prefixes"] == 0


def test_a_seed_that_comes_again_at_every_step():
    runs = [branched(140, length=200, size=2, step=step, shift=step * 0.01) for step in range(3)]
    for each in runs:
        ids = each.column("response_ids").reshape(4, 2, 200)
        ids[:, 1, :140] = torch.arange(140) + 6000 + 1000 * torch.arange(4)[:, None]
    found = find(*runs)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert values(found)["impossible_prefixes"] == 0
    assert values(found)["resampled_prefixes"] == 8
    # The same log-probs are the same sample: a response that was cut and goes on.
    again = [dataclasses.replace(each, step=at) for at, each in enumerate([runs[0]] * 3)]
    assert "prefix" not in (find(*again).headline if find(*again) else "")
