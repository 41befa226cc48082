"""What one to six pasted lines say: facts of a step, and the look-alikes that say nothing."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd
from rolloutdoctor.views.verdict import verdict

VERL = {
    "actor/entropy": 0.41235,
    "actor/pg_loss": 0.00213,
    "actor/grad_norm": 0.23141,
    "critic/score/mean": 0.51234,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/advantages/mean": 0.01234,
    "critic/advantages/max": 1.53245,
    "critic/advantages/min": -1.5123,
    "response_length/mean": 100.1231,
}
SWIFT = {"loss": 0.0123, "grad_norm": 1.4, "kl": 0.0011, "reward": 0.5123, "reward_std": 0.4412, "learning_rate": 1e-5}


def verl(path, *steps):
    """Write a console of verl, the step and what differs from an ordinary line."""
    lines = [
        " - ".join(f"{name}:{value}" for name, value in {"step": step, **VERL, **changed}.items())
        for step, changed in steps
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def jsonl(path, *entries):
    path.write_text("".join(json.dumps({"step": step} | entry) + "\n" for step, entry in enumerate(entries, start=1)))
    return path


def finding(path, code):
    """Return the finding of a rule, None if there is none."""
    return next((one for one in rd.check(path).findings if one.code == code), None)


@pytest.mark.parametrize(
    ("norm", "expected"), [("0.0", "the gradient norm is 0 in step 7 with reward variance"), ("0.00002", None)]
)
def test_a_trainer_that_logs_each_step_needs_one_line_for_a_lost_gradient(tmp_path, norm, expected):
    found = finding(verl(tmp_path / "train.log", (7, {"actor/grad_norm": norm, "actor/pg_loss": "0.0"})), "RDG002")
    assert (found is None) is (expected is None)
    if expected is not None:
        assert (found.headline.partition(":")[0], found.verdict) == (expected, "confirmed")


def test_an_error_behind_the_worst_fault_is_named_not_only_counted(tmp_path):
    none = {f"critic/{name}/{kind}": 0.0 for name in ("score", "advantages") for kind in ("mean", "max", "min")}
    steps = [(step, none | {"actor/grad_norm": "nan"}) for step in (1, 2, 3)]
    said = verdict(rd.check(verl(tmp_path / "train.log", *steps)))
    assert said.startswith("Every reward of all 3 logged steps is 0")
    assert said.endswith(". 1 more fault: actor/grad_norm is NaN in all 3 logged steps.")


def test_a_norm_that_is_printed_as_0_with_three_decimals_is_exposed(tmp_path):
    rounded = {name: f"{value:.3f}" for name, value in VERL.items()} | {"actor/grad_norm": "0.000"}
    found = finding(verl(tmp_path / "train.log", (7, rounded)), "RDG002")
    assert (found.verdict, "printed as 0" in found.headline) == ("exposed", True)


def test_pasted_steps_of_such_a_trainer_are_no_windows(tmp_path):
    free = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "critic/advantages/mean": 0.0}
    free |= {"critic/score/min": 0.51234, "critic/score/max": 0.51234}
    two = finding(verl(tmp_path / "two.log", (8, free), (13, free)), "RDG003")
    assert two.headline == "in steps 8 and 13 every group had equal rewards; both still updated the weights"
    four = finding(verl(tmp_path / "four.log", *((step, free) for step in (3, 6, 9, 12))), "RDG003")
    assert four.headline == "in all 4 steps every group had equal rewards; all of them still updated the weights"


@pytest.mark.parametrize(("bad", "words"), [("nan", "NaN"), ("Infinity", "infinite"), ("-inf", "infinite")])
def test_text_for_a_number_that_is_not_finite_is_that_number(tmp_path, bad, words):
    found = finding(jsonl(tmp_path / "log.jsonl", SWIFT, SWIFT | {"grad_norm": bad}), "RDM003")
    assert found.headline == f"grad_norm is {words} in step 2 (1.4 before)"


def test_each_metric_that_is_not_finite_is_said_of_its_own_steps(tmp_path):
    path = jsonl(tmp_path / "log.jsonl", SWIFT | {"kl": float("nan")}, SWIFT | {"reward": float("inf")}, SWIFT)
    assert finding(path, "RDM003").headline == "reward is infinite in step 2 (0.512 before); kl is NaN in step 1"
    since = jsonl(tmp_path / "since.jsonl", SWIFT, *[SWIFT | {"loss": float("inf"), "kl": float("inf")}] * 2)
    assert finding(since, "RDM003").headline == "loss and kl are infinite from step 2 on (0.0123 and 0.0011 before)"


def test_the_name_of_a_metric_is_not_capitalised(tmp_path):
    report = rd.check(jsonl(tmp_path / "log.jsonl", SWIFT | {"kl": float("nan")}))
    assert verdict(report).startswith("kl is NaN in step 1, the only logged step. ")


@pytest.mark.parametrize(("before", "after", "is_found"), [(0.0, 0.31, True), (0.0, 0.29, False), (0.02, 0.31, False)])
def test_a_kl_that_jumps_in_one_step(tmp_path, before, after, is_found):
    found = finding(jsonl(tmp_path / "log.jsonl", SWIFT | {"kl": before}, SWIFT | {"kl": after}), "RDT004")
    assert (found is not None) is is_found
    if is_found:
        assert found.headline == "KL jumped from 0 to 0.31 nats in one step, at step 2"


@pytest.mark.parametrize(
    ("kl", "rewards", "severity"),
    [
        ([0.0, 0.6, 0.7, 0.8], [0.5, 0.4, 0.5, 0.4], "warning"),
        ([0.0, 0.6, 0.7, 0.8], [0.5, 0.4, 0.5, 0.5], "info"),
        ([0.0, 0.6, 0.2, 0.29], [0.5, 0.4, 0.5, 0.4], "info"),
        ([0.0, 0.6, 0.2, 0.31], [0.5, 0.4, 0.5, 0.4], "warning"),
        ([0.0, 0.6], [0.5, 0.6], "warning"),
        # A reward of some lines alone may have risen, where its last is not below its first.
        ([0.0, 0.6, 0.7, 0.8], [0.5, None, None, 0.5], "info"),
        ([0.0, 0.6, 0.7, 0.8], [0.5, None, None, 0.4], "warning"),
        ([0.0, 0.6, 0.7, 0.8], [None] * 4, "warning"),
    ],
)
def test_a_kl_that_jumps_and_falls_back_or_is_rewarded_is_information(tmp_path, kl, rewards, severity):
    lines = [SWIFT | {"kl": nats, "reward": reward} for nats, reward in zip(kl, rewards, strict=True)]
    lines = [{name: value for name, value in line.items() if value is not None} for line in lines]
    assert finding(jsonl(tmp_path / "log.jsonl", *lines), "RDT004").severity.label == severity


def test_a_reward_printed_with_few_digits_is_0_where_its_extremes_are(tmp_path):
    none = dict.fromkeys(("critic/score/mean", "critic/score/max", "critic/score/min"), "0.0")
    none |= dict.fromkeys(("critic/advantages/mean", "critic/advantages/max", "critic/advantages/min"), "0.0")
    assert finding(verl(tmp_path / "train.log", (1, none)), "RDT002").headline.startswith("every reward of step 1 is 0")
    some = none | {"critic/score/max": "1.0"}
    assert finding(verl(tmp_path / "some.log", (1, some)), "RDT002") is None


@pytest.mark.parametrize(
    ("cut", "step", "found", "is_proved"),
    [
        (0.1, 1, True, True),
        (0.11, 1, True, False),
        (0.99, 1, True, False),
        (1.0, 1, False, False),
        (0.1, 2, False, False),
    ],
)
def test_a_lost_gradient_in_the_first_step_unless_all_that_varies_is_masked(tmp_path, cut, step, found, is_proved):
    """A later line may be of several steps, and the norm of one without reward variance."""
    line = {
        "loss": 0.0,
        "grad_norm": 0.0,
        "reward": 0.70703125,
        "reward_std": 0.13127217,
        "frac_reward_zero_std": 0.5156,
    }
    path = jsonl(tmp_path / "log.jsonl", line | {"completions/clipped_ratio": cut, "step": step, "epoch": 0.01})
    one = finding(path, "RDG002")
    assert (one is not None) is found
    assert one is None or (one.verdict == "confirmed") is is_proved
    assert one is None or ("unless every response" in one.headline) is not is_proved


@pytest.mark.parametrize(
    ("norm", "said"), [(0.0, None), (0.00099, None), (0.0011, "the gradient norm is 0.0011 in 1 step")]
)
def test_a_loss_of_0_beside_a_gradient_is_explained_of_one_line(tmp_path, norm, said):
    line = {"loss": 0.0, "grad_norm": norm, "reward": 0.8965, "reward_std": 0.8323, "kl": 8.57e-05, "epoch": 0.01}
    report = rd.check(jsonl(tmp_path / "log.jsonl", line))
    found = next((one for one in report.findings if one.code == "RDG002" and one.remark), None)
    assert (found is not None and said in verdict(report)) is (said is not None)
    assert verdict(report).startswith("The loss is 0 only as printed") is (said is not None)


@pytest.mark.parametrize(
    ("lines", "severity", "where"), [(2, "info", "all 2 logged steps"), (3, "warning", "all 3 logged steps")]
)
def test_a_function_whose_deviation_is_0_in_three_lines_gives_nothing(tmp_path, lines, severity, where):
    """Not a penalty that nothing incurred."""
    own = {f"rewards/{name}/{part}": 0.0 for name in ("a", "length_penalty") for part in ("mean", "std")}
    path = jsonl(tmp_path / "log.jsonl", *[SWIFT | own] * lines)
    found = finding(path, "RDT002")
    words = f"1 reward function gave 0 to every response of {where}: a"
    assert (found.severity.label, found.verdict, found.headline) == (severity, "confirmed", words)


def test_functions_that_give_nothing_in_one_line_are_named(tmp_path):
    functions = {"rewards/a/mean": 0.0, "rewards/a/std": 0.0, "rewards/b/mean": 0.0, "rewards/b/std": 0.31415}
    found = finding(jsonl(tmp_path / "log.jsonl", SWIFT | functions), "RDT002")
    assert (found.severity.label, found.headline) == (
        "info",
        "1 reward function gave 0 to every response of step 1: a",
    )


@pytest.mark.parametrize(("lines", "last", "found"), [(1, 0.0, False), (2, 0.0, True), (2, 0.0125, False)])
def test_a_function_without_a_deviation_that_gives_nothing_in_two_lines_is_named(tmp_path, lines, last, found):
    line = {"loss": 0.0071, "reward": 1.1644, "kl": 0.0184, "rewards/format": 0.0, "rewards/right": 0.3333}
    path = jsonl(tmp_path / "log.jsonl", *([line] * (lines - 1)), line | {"rewards/format": last})
    one = finding(path, "RDT002")
    assert (one is not None) is found
    assert one is None or one.remark == "1 reward function has a mean of 0 in all 2 logged steps: format"


@pytest.mark.parametrize(
    ("k3", "severity"), [(0.51, "warning"), (0.49, "info"), (0.11, "info"), (0.09, None), (0.02, None)]
)
def test_one_line_in_which_sampler_and_trainer_are_nats_apart(tmp_path, k3, severity):
    path = jsonl(tmp_path / "log.jsonl", {"train/gen_kl_error": k3, "train/probs_ratio": 1.0, "train/loss": 0.01234})
    found = finding(path, "RDO012")
    assert (None if found is None else found.severity.label) == severity
    if severity == "info":
        assert verdict(rd.check(path)).startswith("Sampler and trainer disagree: a k3 of ")


@pytest.mark.parametrize(("clipped", "found"), [((0.41,), True), ((0.39,), False), ((0.9, 0.39), False), ((), False)])
def test_few_lines_in_which_most_is_clipped(tmp_path, clipped, found):
    lines = [SWIFT | {"clip_ratio": share} for share in clipped] or [SWIFT]
    path = jsonl(tmp_path / "log.jsonl", *lines)
    one = finding(path, "RDT007")
    assert (one is not None) is found
    if found:
        assert (one.severity.label, one.verdict) == ("info", "exposed")
        assert verdict(rd.check(path)).startswith("41 % of the tokens are clipped: their policy gradient is 0 (RDT007)")


@pytest.mark.parametrize(("lines", "leads"), [(3, True), (2, False)])
def test_a_kl_that_is_negative_in_most_lines_is_said_first(tmp_path, lines, leads):
    negative = [SWIFT | {"kl": -0.35}] * lines
    path = jsonl(tmp_path / "log.jsonl", *negative, *[SWIFT | {"kl": 0.01}] * 2)
    assert finding(path, "RDM003").severity.label == "info"
    assert ("The logged KL is negative" in verdict(rd.check(path))) is leads


def test_one_line_shows_its_vitals(tmp_path):
    vitals = {one.name: one.series for one in rd.check(jsonl(tmp_path / "log.jsonl", SWIFT)).vitals}
    assert vitals["reward"] == (0.5123,)


def test_the_ppo_of_trl_has_a_kl_of_responses(tmp_path):
    entry = {
        "objective/kl": 0.4,
        "objective/entropy": 30.1,
        "objective/scores": 1.23,
        "objective/rlhf_reward": 1.1,
        "policy/approxkl_avg": 0.01,
        "loss/policy_avg": 0.1,
        "val/num_eos_tokens": 3,
    }
    grown = [entry | {"objective/kl": 0.4 + step, "objective/scores": 1.23 + step / 100} for step in range(12)]
    report = rd.check(jsonl(tmp_path / "log.jsonl", *grown))
    assert [vital.title for vital in report.vitals] == ["reward", "KL of a response"]
    # A sum over a response of some nats is ordinary, and rlhf_reward is no reward function.
    assert not {"RDT004", "RDT002", "RDG012"} & {one.code for one in report.findings}
    for kl, is_found in ((-29.9, False), (-30.1, True)):
        below = finding(jsonl(tmp_path / "below.jsonl", entry | {"objective/kl": kl}), "RDM003")
        assert (below is not None and "not sampled from the policy" in below.headline) is is_found
    # An update of a policy's own samples is below -4.61 in one of 100 at most; of ten updates one is.
    for kl, lines, is_found in ((-4.6, 1, False), (-4.61, 1, True), (-6.9, 10, False), (-6.91, 10, True)):
        others = [entry] * (lines - 1)
        low = finding(jsonl(tmp_path / "low.jsonl", entry | {"objective/kl": kl}, *others), "RDM003")
        assert (low is not None and low.severity.label == "info" and "at most one update in" in low.remark) is is_found
    # Each padded token counts as a log-prob of 1.
    padded = jsonl(tmp_path / "padded.jsonl", entry | {"objective/entropy": -3.5, "policy/entropy_avg": 0.5})
    assert finding(padded, "RDM003") is None
    negative = finding(jsonl(tmp_path / "negative.jsonl", entry | {"policy/entropy_avg": -3.5}, entry), "RDM003")
    assert negative.headline == "policy/entropy_avg is -3.5 in step 1: the entropy cannot be below 0"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("loss", "rewards/chosen", "rewards/rejected", "kl"), "preference training (KTO)"),
        (("loss", "mean_reward_chosen", "mean_reward_rejected"), "preference or reward-model training"),
        (("lm_loss", "grad_norm"), "language-model training"),
        (("loss", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"), "reward-model training"),
    ],
)
def test_other_kinds_of_training_are_named(tmp_path, names, kind):
    report = rd.check(jsonl(tmp_path / "log.jsonl", dict.fromkeys(names, 0.5)))
    assert verdict(report) == f"This is a log of {kind}, which is not checked."


@pytest.mark.parametrize(
    "names", [("rewards/chosen_length/mean",), ("min_reward", "mean_reward", "max_reward", "accuracy")]
)
def test_a_policy_may_log_what_reward_models_do(tmp_path, names):
    report = rd.check(jsonl(tmp_path / "log.jsonl", SWIFT | dict.fromkeys(names, 1.0)))
    assert "not checked" not in verdict(report)


ENDED = {
    "rises in noise": (0.795, 1.0, 0.85, 1.3, 1.2, 1.38, 1.3, 1.21),
    "stays": (0.13, 0.14, 0.124, 0.131),
    "falls in noise": (0.5, 0.2, 0.45, 0.3, 0.35, 0.2),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_few_lines_of_a_training_that_ended_are_too_few_to_tell(tmp_path, case):
    """A learning rate that has decayed says that the run is over, not that its reward has not moved."""
    rates = np.linspace(1e-5, 0, len(ENDED[case]))
    lines = [{"reward": reward, "learning_rate": rate} for reward, rate in zip(ENDED[case], rates, strict=True)]
    log = jsonl(tmp_path / "log.jsonl", *lines)
    assert finding(log, "RDT016") is None
    assert f"{len(lines)} lines are too few to tell whether the reward rises" in verdict(rd.check(log))


def test_many_lines_of_a_training_that_ended_tell_that_the_reward_has_not_moved(tmp_path):
    rates = np.linspace(1e-5, 0, 24)
    lines = [{"reward": 0.5 + 0.1 * (at % 3), "learning_rate": rate} for at, rate in enumerate(rates)]
    assert finding(jsonl(tmp_path / "log.jsonl", *lines), "RDT016") is not None
