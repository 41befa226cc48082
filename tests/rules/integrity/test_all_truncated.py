"""RDI012: runs in which nothing is ever finished, from rows and from logs."""

import dataclasses
import json

import pytest
from rules.checking import found_by, outcomes, report_on, values
from rules.test_log_alone import only, report_of, trainer_state

from rolloutdoctor.testing import check_log, toy_batch

CUT = {
    "completions/clipped_ratio": 1.0,
    "completions/min_length": 256.0,
    "completions/max_length": 256.0,
    "completions/mean_length": 256.0,
    "frac_reward_zero_std": 1.0,
    "grad_norm": 0.0,
    "loss": 0.0,
}
FINE = CUT | {
    "completions/clipped_ratio": 0.125,
    "completions/min_length": 20.0,
    "completions/mean_length": 150.0,
    "frac_reward_zero_std": 0.25,
}


STOPPED = CUT | {"completions/min_length": 20.0, "completions/mean_length": 80.0}

LITTLE = {"loss": 0.1, "reward": 0.5, "frac_reward_zero_std": 0.1, "clip_ratio/region_mean": 0.0}


def outcome(report):
    return outcomes(report)["RDI012"]


def test_every_completion_of_a_trl_log(tmp_path):
    found, value = only(report_of(trainer_state(tmp_path, *[CUT] * 6)), "RDI012")
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert found.headline == "every response in 6 steps is truncated at 256 tokens, 6 steps without reward variance"
    assert value["truncated_windows"] == 6
    assert value["reward_free_share"] == 1
    assert found.examples[0].note == "100 % of the responses truncated"


def test_windows_are_called_windows(tmp_path):
    path = trainer_state(tmp_path, *[CUT] * 4)
    body = json.loads(path.read_text())
    for entry in body["log_history"]:
        entry["step"] *= 5
    path.write_text(json.dumps(body | {"logging_steps": 5}))
    found, _ = only(report_of(path), "RDI012")
    assert "every response in 4 windows of 5 steps is truncated" in found.headline


def test_one_finished_response_is_no_error(tmp_path):
    almost = CUT | {"completions/clipped_ratio": 0.999, "completions/min_length": 80.0}
    found, _ = only(report_of(trainer_state(tmp_path, *[CUT] * 5, almost)), "RDI012")
    assert found.severity.label == "warning"
    assert found.headline == "nearly 100 % of the responses are truncated over 6 steps"


@pytest.mark.parametrize(
    "entries",
    [
        [FINE] * 6,
        [CUT] + [FINE] * 6,
        # Stop strings leave no end-of-sequence token, and lengths of their own: here in few responses.
        [STOPPED | {"completions/clipped_ratio": 0.32}] * 6,
        # The task fixes the length, and responses end there.
        [CUT | {"completions/clipped_ratio": 0.0}] * 6,
    ],
)
def test_clean_logs(tmp_path, entries):
    assert outcome(report_of(trainer_state(tmp_path, *entries))) == "clean"


def test_lengths_below_the_recorded_cap(tmp_path):
    path = trainer_state(tmp_path, *[CUT] * 6)
    found, value = only(report_of(path, "max_completion_length=512", trainer="trl"), "RDI012")
    assert (found.severity.label, value["counted_share"]) == ("info", 1)
    assert found.remark == (
        "no response ends with an end-of-sequence token (counted as truncated) in all 6 steps, although all are "
        "shorter than the length limit"
    )
    found, _ = only(report_of(path, "max_completion_length=256", trainer="trl"), "RDI012")
    assert found.severity.label == "error"


@pytest.mark.parametrize(
    ("share", "steps", "told"),
    [
        (1.0, 6, "no response ends with an end-of-sequence token (counted as truncated) in all 6 steps"),
        (0.5, 6, "50 % of the responses do not end with an end-of-sequence token (counted as truncated) over 6 steps"),
        (0.34, 9, "34 % of the responses do not end"),
        (0.32, 9, None),
        (0.26, 10, "26 % of the responses do not end"),
        (0.24, 10, None),
    ],
)
def test_responses_that_another_thing_than_the_limit_ended(tmp_path, share, steps, told):
    entry = STOPPED | {"completions/clipped_ratio": share, "completions/mean_length": 0.9 * share * 256}
    report = report_of(trainer_state(tmp_path, *[entry] * steps))
    if told is None:
        assert outcome(report) == "clean"
        return
    found, value = only(report, "RDI012")
    assert found.headline.startswith(told)
    assert found.headline.endswith(", although lengths differ")
    assert (found.severity.label, found.remark) == ("info", found.headline)
    assert value["counted_share"] == pytest.approx(share)


def test_a_share_of_an_unknown_trainer_says_nothing_of_tokens():
    log = {"truncated_share": [1.0] * 6, "response_length": [80.0] * 6, "response_length_max": [256.0] * 6}
    (found,) = check_log("RDI012", "verl", **log).findings
    assert found.headline == "every response counts as truncated in all 6 steps, although lengths differ"


def test_rewards_that_differ_are_a_warning(tmp_path):
    found, value = only(report_of(trainer_state(tmp_path, *[CUT | {"frac_reward_zero_std": 0.0}] * 6)), "RDI012")
    assert found.severity.label == "warning"
    assert value["reward_free_share"] == 0
    assert "the task may fix the length" in found.message
    # Two steps say little of a run.
    found, _ = only(report_of(trainer_state(tmp_path, *[CUT] * 2)), "RDI012")
    assert found.severity.label == "warning"


def verl_log(folder, share, least=512.0, steps=6):
    data = {
        "response_length/clip_ratio": share,
        "response_length/min": least,
        "response_length/max": 512.0,
        "response_length/mean": 512.0,
        "actor/grad_norm": 0.1,
        "actor/pg_loss": 0.0,
    }
    lines = [json.dumps({"step": step, "data": data}) for step in range(1, steps + 1)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "log.jsonl"


def test_a_verl_log_without_its_estimator(tmp_path):
    found, _ = only(report_of(verl_log(tmp_path, 1.0)), "RDI012")
    assert found.severity.label == "error"
    # Its ratio counts the padded width: another cap leaves it at 0.
    (skipped,) = [one for one in report_of(verl_log(tmp_path, 0.0)).skipped if one.code == "RDI012"]
    assert "another length limit" in skipped.reason
    assert outcome(report_of(verl_log(tmp_path, 0.0, least=80.0))) == "clean"


def test_a_log_that_does_not_say_it(tmp_path):
    (skipped,) = [one for one in report_of(trainer_state(tmp_path, LITTLE)).skipped if one.code == "RDI012"]
    assert "completions/clipped_ratio" in skipped.remedy


def ended(*statuses, rewards=((0, 0), (1, 1)), lengths=4, step=0):
    return dataclasses.replace(toy_batch(rewards, lengths=lengths, step=step), statuses=statuses)


def find(batches):
    return found_by("RDI012", batches, trainer=None)


def test_rows_say_it_themselves():
    cut = [ended(*["length"] * 4, step=step) for step in range(3)]
    found = find(cut)
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert values(found)["reward_free_share"] == 1
    assert find([*cut, ended("length", "stop", "length", "length", step=3)]).severity.label == "info"
    found = find([ended(*["truncated"] * 4, rewards=((0, 1), (1, 0)), step=step) for step in range(3)])
    assert found.severity.label == "warning"


def test_mostly_cut_off_over_five_steps():
    rewards = ((0,) * 10, (1,) * 10)
    mostly = [ended(*["length"] * 19, "stop", rewards=rewards, step=step) for step in range(5)]
    found = find(mostly)
    assert found.severity.label == "warning"
    assert values(found)["truncated_share"] == pytest.approx(0.95)
    assert find(mostly[:4]).severity.label == "info"
    fewer = [ended(*["length"] * 6, *["stop"] * 14, rewards=rewards, step=step) for step in range(4)]
    assert find(fewer) is None


@pytest.mark.parametrize(
    ("share", "steps", "is_told"), [(0.24, 10, False), (0.26, 10, True), (0.32, 9, False), (0.34, 9, True)]
)
def test_a_quarter_of_all_responses_of_ten_steps(share, steps, is_told):
    cut = round(100 * share)
    batch = [
        ended(*["length"] * cut, *["stop"] * (100 - cut), rewards=((0,) * 50, (1,) * 50), step=n) for n in range(steps)
    ]
    assert (find(batch) is not None) == is_told


@pytest.mark.parametrize(
    ("lengths", "is_told"), [([32] * 10, True), ([32] * 9, False), ([32.5] * 10, False), ([32] * 9 + [31], False)]
)
def test_a_mean_length_that_stays(lengths, is_told):
    report = check_log("RDI012", "trl", response_length=lengths)
    assert [(one.severity.label, one.verdict) for one in report.findings] == [("warning", "exposed")] * is_told
    assert is_told or report.skipped


@pytest.mark.parametrize(
    ("lengths", "since"),
    [
        ([*range(20, 30), *[32] * 10], 10),
        ([*range(20, 30), *[32] * 9], None),
        # Another limit, or none: longer ones were there before.
        ([33, *range(20, 29), *[32] * 10], None),
    ],
)
def test_a_mean_length_that_reaches_its_limit(lengths, since):
    report = check_log("RDI012", "trl", response_length=lengths)
    told = [one.headline.partition(" is ")[0] for one in report.findings]
    first = report.findings[0].examples[0].step if report.findings else None
    assert told == ([] if since is None else [f"every response in 10 steps from step {first} on"])
    assert since is None or len(lengths) - since == 10


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([*[32] * 10, *[20] * 30], "every response in 25 % of 40 steps has 32 tokens, as at a length limit"),
        ([*[32] * 10, *[20] * 31], ""),
        ([*[32] * 9, *[20] * 9, 20], ""),
        # Answers of a few tokens are of one length by themselves.
        ([*[16] * 10, *[10] * 10], "every response in 50 % of 20 steps has 16 tokens, as at a length limit"),
        ([*[15] * 10, *[10] * 10], ""),
        ([*[32] * 9, 20, *[32] * 1], "every response in 90.9 % of 11 steps has 32 tokens, as at a length limit"),
    ],
)
def test_a_mean_length_that_is_at_its_limit_in_a_quarter_of_the_lines(lengths, told):
    report = check_log("RDI012", "trl", response_length=lengths)
    assert [one.headline for one in report.findings] == ([told] if told else [])
    assert told or report.skipped
    severity = "warning" if "90.9" in told else "info"
    assert not told or (report.findings[0].severity.label, report.findings[0].verdict) == (severity, "exposed")


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ({"response_length": [90.0, 90.2]}, "at least 80.2 % are longer than half of it"),
        ({"response_length": [99.5, 99.7]}, "at least 99.2 % are longer than half of it and 60 % are at it"),
        ({"response_length": [89.0, 90.5]}, ""),
        # Another limit was in force.
        ({"response_length": [99.0, 110.0]}, ""),
    ],
)
def test_a_mean_length_near_a_stated_limit(log, told):
    report = check_log("RDI012", "trl", max_completion_length=100, **log)
    assert [one.headline.partition(": ")[2] for one in report.findings] == (
        [f"{told}, so most are probably truncated"] if told else []
    )
    assert told or report.skipped


@pytest.mark.parametrize(("stated", "is_told"), [({}, False), ({"max_completion_length": 512}, True)])
def test_a_default_states_no_limit(stated, is_told):
    """Not even one that decides nothing in the objective, and is not assumed for that."""
    report = check_log("RDI012", "trl-rloo", response_length=[500.25, 501.5] * 6, **stated)
    assert bool(report.findings) == is_told


@pytest.mark.parametrize(
    ("longest", "is_told"),
    [([100.0] * 9 + [80.0], True), ([100.0] * 8 + [80.0] * 2, False), ([100.0] * 3, True), ([100.0] * 2, False)],
)
def test_the_longest_response_of_nearly_all_lines_is_the_limit(longest, is_told):
    log = {"response_length": [75.0 if one == 80 else 95.5 for one in longest], "response_length_max": longest}
    assert bool(check_log("RDI012", "openrlhf", **log).findings) == is_told


@pytest.mark.parametrize(("length", "is_told"), [(15.0, False), (16.0, True)])
def test_answers_of_a_few_tokens_are_of_one_length_by_themselves(length, is_told):
    log = {"response_length": [length - 0.5] * 3 + [length] * 20, "reward": [0.9, 1.0] * 11 + [0.9]}
    assert bool(check_log("RDI012", "trl", **log).findings) == is_told


def test_skipped_without_finish_reasons():
    (skipped,) = report_on(toy_batch([[0, 1]]), trainer=None, select=["RDI012"]).skipped
    assert "neither rows nor log" in skipped.reason


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([0.0] * 4, ["no response of 4 steps has an end-of-sequence token"]),
        # One response of one step has one: how many of the others have none is not logged.
        ([0.0, 0.0, 1.0, 0.0], []),
    ],
)
def test_a_log_of_end_of_sequence_tokens(tokens, told):
    series = {"objective/scores": [0.5, 0.25] * 2, "objective/kl": [1.0] * 4, "val/num_eos_tokens": tokens}
    report = check_log("RDI012", **{name: values[: len(tokens)] for name, values in series.items()})
    assert [one.headline for one in report.findings] == told
    assert [one.code for one in report.skipped] == ([] if told else ["RDI012"])
