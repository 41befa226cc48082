"""The rules that read a trainer's log and nothing else: what each claims follows from what the trainer logs."""

import json

import pytest
from importers.importing import DATA
from rules.checking import outcomes

import rolloutdoctor as rd
from rolloutdoctor.commands.info.query import describe
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import read_settings
from rolloutdoctor.engine.gathering import measure
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.run_steps import run_file_steps
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.rules.table import find
from rolloutdoctor.testing import check_log, diagnose_log

REWARD_FREE = {"frac_reward_zero_std": 1.0, "loss": 9.192e-06, "kl": 2.298e-04, "grad_norm": 1.32e-03}
ORDINARY = {"frac_reward_zero_std": 0.25, "loss": 0.01, "kl": 1e-04, "grad_norm": 0.8}


def trainer_state(folder, *entries, name="trainer_state.json"):
    history = [{"step": step, **values} for step, values in enumerate(entries, start=1)]
    (folder / name).write_text(json.dumps({"log_history": history, "logging_steps": 1}))
    return folder / name


def opened(path):
    return open_any([str(path)], trainer=None, options=ConvertOptions(), tell=lambda text: None, logs_alone=True)


def report_of(path, *settings, trainer=None):
    layers = [read_settings(settings, "command line")]
    with opened(path) as run:
        return check(run, CheckOptions(trainer=trainer, layers=layers, device="cpu"))


def only(report, code):
    (found,) = [finding for finding in report.findings if finding.code == code]
    return found, {name: measure.value for name, measure in found.measures.items()}


def test_a_step_without_reward_in_a_trl_log(tmp_path):
    found, value = only(report_of(trainer_state(tmp_path, ORDINARY, ORDINARY, REWARD_FREE, ORDINARY)), "RDG003")
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    assert value["steps_share"] == 0.25
    assert value["grad_norm"] == 1.32e-03
    assert value["grad_norm_ratio"] == pytest.approx(1.32e-03 / 0.8)
    # The identity that gives the coefficient away.
    assert value["loss_by_kl"] == pytest.approx(0.04, rel=1e-4)
    assert [example.step for example in found.examples] == [3]


@pytest.mark.parametrize(("others", "severity"), [(3, "info"), (2, "warning")])
def test_most_steps_without_reward_are_a_warning(tmp_path, others, severity):
    found, _ = only(report_of(trainer_state(tmp_path, *[ORDINARY] * others, *[REWARD_FREE] * 3)), "RDG003")
    assert found.severity.label == severity


def test_a_step_of_which_the_log_says_nothing_counts_as_another(tmp_path):
    told = {"loss": 0.0, "grad_norm": 0.2, "kl": 0.0, "reward": 1.0, "reward_std": 0.0}
    untold = told | {"reward_std": 0.5}
    found, value = only(report_of(trainer_state(tmp_path, untold, told, untold, untold)), "RDG003")
    assert value["steps_share"] == 0.25
    assert found.headline.startswith("in step 2 (1 of 4 steps) every group had equal rewards")


def test_dead_steps_moved_nothing(tmp_path):
    found, value = only(report_of(trainer_state(tmp_path, ORDINARY, REWARD_FREE | {"grad_norm": 0.0})), "RDG003")
    assert found.severity.label == "info"
    assert value["dead_steps"] == 1
    assert found.examples == ()


@pytest.mark.parametrize("share", [0.999, 0.0])
def test_a_share_below_one_says_nothing(tmp_path, share):
    report = report_of(trainer_state(tmp_path, ORDINARY | {"frac_reward_zero_std": share}))
    assert "RDG003" in [code for code, _ in report.clean]


def test_a_log_that_does_not_tell_is_skipped_with_what_would(tmp_path):
    report = report_of(trainer_state(tmp_path, {"loss": 0.1, "grad_norm": 1.0, "kl": 0.01, "num_tokens": 5.0}))
    (skipped,) = [one for one in report.skipped if one.code == "RDG003"]
    assert "frac_reward_zero_std" in skipped.remedy


@pytest.mark.parametrize(("highest", "told"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("others", [2, 4])
def test_equal_rewards_within_every_group_and_not_between_prompts(others, highest, told, tmp_path):
    scores = {"critic/score/mean": highest / 2, "critic/score/min": 0.0, "critic/score/max": highest}
    advantages = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    line = {"actor/pg_loss": 0.0, "actor/kl_loss": 0.02, "actor/grad_norm": 0.006} | scores
    spread = advantages | {"critic/advantages/max": 1.0}
    lines = [line | advantages] * 3 + [line | spread] * others
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step} | each) + "\n" for step, each in enumerate(lines, start=1)))
    found = next(one for one in report_of(path).findings if one.code == "RDG003")
    is_told = told and others < 3
    assert ("though rewards differ between prompts" in found.headline) is is_told
    assert found.advice.startswith("check that each prompt gets several") is is_told


@pytest.mark.parametrize(("lowest", "code"), [(0.0, "RDG003"), (-1e-9, None)])
def test_advantages_of_zero_in_a_verl_log(tmp_path, lowest, code):
    data = {"critic/advantages/max": 0.0, "critic/advantages/min": lowest, "actor/grad_norm": 0.5}
    data |= {"actor/pg_loss": 0.0, "actor/kl_loss": 0.25, "actor/kl_coef": 0.001}
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    report = report_of(tmp_path / "log.jsonl")
    _, value = only(report, "RDG004")
    assert value["kl_loss"] == 0.25 * 0.001
    assert value["grad_norm"] == 0.5
    assert [finding.code for finding in report.findings if finding.code == "RDG003"] == [code] * bool(code)


def test_the_loss_is_the_kl_term_only_where_beta_is_stated(tmp_path):
    path = trainer_state(tmp_path, ORDINARY, REWARD_FREE | {"frac_reward_zero_std": 0.5})
    assert "RDG004" in [skipped.code for skipped in report_of(path, trainer="trl").skipped]
    found, value = only(report_of(path, "beta=0.04", trainer="trl"), "RDG004")
    assert found.severity.label == "info"
    assert value["kl_only_steps"] == 1
    assert value["loss"] == 9.192e-06
    report = report_of(path, "beta=0.05", trainer="trl")
    assert "RDG004" in [code for code, _ in report.clean]


def test_a_logged_policy_loss_goes_before_a_stated_coefficient():
    # The loss is 5 times the KL, but it has a policy part: the log's own coefficient is 2.
    log = {"loss": [0.5] * 9, "kl": [0.1] * 9, "policy_loss": [0.3] * 9}
    assert diagnose_log("RDG004", "trl", **log, beta=5.0) == "RDG004 clean"
    del log["policy_loss"]
    assert diagnose_log("RDG004", "trl", **log, beta=5.0).startswith("RDG004 info confirmed")


def test_a_loss_that_is_printed_as_0_bounds_the_coefficient_of_the_kl():
    # Half of the fourth digit, 0.00005, by the KL.
    (found,) = check_log("RDG002", "trl", loss=[0.0] * 10, grad_norm=[1.5] * 10, kl=[0.002] * 10).findings
    assert "if the loss has a KL term, its coefficient is below 0.025" in found.message


def test_the_norm_of_kl_only_steps_is_a_mean_over_those_that_logged_one(tmp_path):
    # A missing norm is not a norm of 0, and does not pull the mean down.
    silent = {name: value for name, value in REWARD_FREE.items() if name != "grad_norm"}
    path = trainer_state(tmp_path, REWARD_FREE, silent, REWARD_FREE | {"grad_norm": 3 * 1.32e-03})
    found, value = only(report_of(path, "beta=0.04", trainer="trl"), "RDG004")
    assert (value["kl_only_steps"], value["dead_steps"]) == (3, 0)
    assert value["grad_norm"] == pytest.approx(2 * 1.32e-03)
    assert "the logged gradient norm is 0.00264" in found.message


def test_a_loss_rounded_to_four_digits_is_not_taken_for_the_kl_term(tmp_path):
    path = trainer_state(tmp_path, REWARD_FREE | {"loss": 0.0})
    assert "RDG004" in [code for code, _ in report_of(path, "beta=0.04", trainer="trl").clean]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "kl"])
def test_nan_in_the_log_is_an_error(tmp_path, name):
    found, value = only(report_of(trainer_state(tmp_path, ORDINARY, ORDINARY | {name: float("nan")})), "RDM003")
    # The KL alone reaches no weight while the loss is finite.
    assert (found.severity.label, found.verdict) == ("warning" if name == "kl" else "error", "confirmed")
    assert found.headline == f"{name} is NaN in step 2 ({ORDINARY[name]:g} before)"
    assert value["nonfinite_steps"] == 1
    assert found.examples[0].step == 2


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("absent", ["loss", "grad_norm", "kl"])
@pytest.mark.parametrize("name", ["loss", "grad_norm", "kl"])
def test_a_step_that_logged_less_changes_nothing_about_nan(tmp_path, name, absent):
    less = {each: value for each, value in ORDINARY.items() if each != absent}
    found, value = only(report_of(trainer_state(tmp_path, ORDINARY | {name: float("nan")}, less, ORDINARY)), "RDM003")
    assert found.severity.label == ("warning" if name == "kl" else "error")
    assert found.headline == f"{name} is NaN in step 1"
    assert (value["nonfinite_steps"], found.examples[0].step) == (1, 1)


def test_a_kl_that_is_nan_throughout_is_a_warning(tmp_path):
    """Whatever was not computed hides what it would show."""
    path = trainer_state(tmp_path, *[ORDINARY | {"kl": float("nan")}] * 3)
    found, _ = only(report_of(path), "RDM003")
    assert (found.severity.label, found.headline) == ("warning", "kl is NaN in all 3 logged steps")


def test_a_nan_under_a_name_that_nobody_knows_is_told(tmp_path):
    mine = [{**ORDINARY, "mine/odd": value} for value in (1.0, float("nan"), 2.0)]
    found, value = only(report_of(trainer_state(tmp_path, *mine)), "RDM003")
    assert (found.severity.label, found.verdict, value["nonfinite_steps"]) == ("info", "confirmed", 1)
    assert found.headline == "mine/odd is NaN in step 2 (1 before)"
    # A known one is the first to be told.
    found, _ = only(report_of(trainer_state(tmp_path, ORDINARY, {**ORDINARY, "a": float("inf"), "loss": float("nan")})),
                    "RDM003")  # fmt: skip
    assert found.severity.label == "error"
    assert found.headline.startswith("loss and a are NaN or infinite in step 2")


def test_one_line_of_nan_names_the_step_and_the_metrics(tmp_path):
    bad = dict.fromkeys(("clip_ratio/low_min", "clip_ratio/high_max", "entropy"), float("nan"))
    path = trainer_state(tmp_path, ORDINARY | bad)
    found, _ = only(report_of(path), "RDM003")
    assert (found.severity.label, found.headline) == (
        "warning",
        "entropy and 2 more metrics are NaN in step 1, the only logged step",
    )


@pytest.mark.parametrize(
    ("metric", "value", "severity"),
    [
        ("entropy", [-0.3, 0.2], "warning"),
        # All of one sign may be the other sign's convention.
        ("entropy", [-0.3, -0.2], "info"),
        ("completions/clipped_ratio", [1.2, 0.2], "warning"),
        ("completions/clipped_ratio", [1.00002, 0.2], None),
        ("frac_reward_zero_std", [-0.1, 0.2], "warning"),
        ("learning_rate", [-1e-3, 1e-6], "warning"),
    ],
)
def test_a_value_that_cannot_be(tmp_path, metric, value, severity):
    path = trainer_state(tmp_path, *(ORDINARY | {metric: each} for each in value))
    found = [one for one in report_of(path).findings if one.code == "RDM003"]
    assert [(one.severity.label, one.onset) for one in found] == ([] if severity is None else [(severity, 1)])


@pytest.mark.parametrize(("lines", "after", "severity"), [(60, 0.01, "info"), (60, 0.9, None), (30, 0.01, "info")])
def test_one_outlier_in_a_long_log_that_changed_nothing_is_information(tmp_path, lines, after, severity):
    kl = [0.01] * (lines // 2) + [2.5] + [after] * (lines - lines // 2)
    path = trainer_state(tmp_path, *(ORDINARY | {"kl": each} for each in kl))
    found = [one.severity.label for one in report_of(path).findings if one.code == "RDM003"]
    assert found == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("kl", "severity"),
    [
        pytest.param([2.5, 0.011], "info", id="the next line is back"),
        pytest.param([2.5, 0.011, 0.02], "info", id="both lines are at most twice the level"),
        pytest.param([2.5, 0.011, 0.021], "warning", id="one line is above twice the level"),
        pytest.param([2.5, 2.4, 0.01], "warning", id="two outliers"),
        pytest.param([2.5], "warning", id="nothing after it"),
    ],
)
def test_one_kl_spike_near_the_end_is_information_once_the_kl_is_back(tmp_path, kl, severity):
    path = trainer_state(tmp_path, *(ORDINARY | {"kl": each} for each in [0.01] * 40 + kl))
    assert only(report_of(path), "RDM003")[0].severity.label == severity


@pytest.mark.parametrize(("kl", "is_said"), [(99.0, False), (101.0, True)])
def test_a_spike_that_one_token_makes_is_said_beside_no_fault(tmp_path, kl, is_said):
    path = trainer_state(tmp_path, *(ORDINARY | {"kl": each} for each in [0.01] * 30 + [kl] + [0.01] * 30))
    found, _ = only(report_of(path), "RDM003")
    assert (found.severity.label, bool(found.remark)) == ("info", is_said)


@pytest.mark.parametrize(("kl", "severity"), [(0.25, "info"), (2.5, "warning")])
def test_a_spike_of_a_small_kl_is_information(tmp_path, kl, severity):
    path = trainer_state(tmp_path, *[ORDINARY | {"kl": 0.01}] * 20, ORDINARY | {"kl": kl})
    assert only(report_of(path), "RDM003")[0].severity.label == severity


def test_a_gradient_norm_out_of_all_proportion(tmp_path):
    huge = trainer_state(tmp_path, ORDINARY, ORDINARY | {"grad_norm": 2.5e9}, ORDINARY | {"grad_norm": 2e9})
    found, value = only(report_of(huge), "RDM003")
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert found.headline == "a gradient norm of 2.5e+09 in 2 steps"
    assert value["grad_norm_max"] == 2.5e9
    assert outcomes(report_of(trainer_state(tmp_path, ORDINARY | {"grad_norm": 1e6})))["RDM003"] == "clean"


def test_nan_of_the_critic_is_an_error(tmp_path):
    lines = [
        f"step:{step} - actor/pg_loss:0.01 - actor/grad_norm:0.5 - critic/vf_loss:{value} - critic/grad_norm:2.5\n"
        for step, value in ((1, "0.25"), (2, "nan"))
    ]
    (tmp_path / "train.log").write_text("".join(lines))
    found, _ = only(report_of(tmp_path / "train.log"), "RDM003")
    assert (found.severity.label, found.headline) == ("error", "critic/vf_loss is NaN in step 2 (0.25 before)")


@pytest.mark.slow
def test_a_kl_that_cannot_be_negative(tmp_path):
    path = trainer_state(tmp_path, ORDINARY | {"kl": -0.5})
    found, value = only(report_of(path, "beta=0.04", trainer="trl"), "RDM003")
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert value["lowest_kl"] == -0.5
    # k1, which RLOO has, may be negative.
    assert outcomes(report_of(path, trainer="trl-rloo"))["RDM003"] == "clean"
    # Nothing says what an unnamed trainer estimates, nor whether the KL is that of a term in the loss.
    for trainer in (None, "trl"):
        found, _ = only(report_of(path, trainer=trainer), "RDM003")
        assert (found.severity.label, "it is k1" in found.headline) == ("info", True)
    path = trainer_state(tmp_path, ORDINARY | {"kl": -0.009})
    assert "RDM003" in [code for code, _ in report_of(path, "beta=0.04", trainer="trl").clean]


def test_one_step_that_stands_out(tmp_path):
    usual = [ORDINARY | {"grad_norm": 1.0}] * 10
    found, value = only(report_of(trainer_state(tmp_path, *usual, ORDINARY | {"grad_norm": 20.0})), "RDT008")
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert value["largest_ratio"] == pytest.approx(20.0)
    assert found.examples[0].step == 11
    report = report_of(trainer_state(tmp_path, *usual, ORDINARY | {"grad_norm": 10.0}))
    assert "RDT008" in [code for code, _ in report.clean]


def test_of_ten_steps_none_stands_out(tmp_path):
    # With so few others a large norm is no outlier, however large: there have to be more than ten values.
    few = [ORDINARY | {"grad_norm": 1.0}] * 9
    report = report_of(trainer_state(tmp_path, *few[:8], ORDINARY | {"grad_norm": 1000.0}))
    assert "RDT008" in [one.code for one in report.skipped]


def test_means_over_several_steps_are_read_too(tmp_path):
    path = trainer_state(tmp_path, ORDINARY, REWARD_FREE)
    body = json.loads(path.read_text())
    for entry in body["log_history"]:
        entry["step"] *= 10
    path.write_text(json.dumps(body))
    found, _ = only(report_of(path, "beta=0.04", "logging_steps=10", trainer="trl"), "RDG003")
    assert found.examples[0].step == 20


def every(steps, path):
    """The log of a run that logs every so many steps."""
    body = json.loads(path.read_text())
    for entry in body["log_history"]:
        entry["step"] *= steps
    path.write_text(json.dumps(body | {"logging_steps": steps}))
    return path


def test_the_remedy_follows_from_what_moved(tmp_path):
    dead = REWARD_FREE | {"grad_norm": 0.0}
    found, _ = only(report_of(trainer_state(tmp_path, ORDINARY, dead)), "RDG003")
    assert "use prompts that are neither too easy nor too hard" in found.advice
    assert "none of them updated the weights" in found.message
    found, _ = only(report_of(trainer_state(tmp_path, ORDINARY, REWARD_FREE)), "RDG003")
    assert found.advice.startswith("only the KL, entropy or auxiliary loss moved the weights")
    found, _ = only(report_of(every(5, trainer_state(tmp_path, ORDINARY, dead, dead))), "RDG003")
    assert (
        found.headline == "in 2 of 3 windows of 5 steps every group had equal rewards; none of them updated the weights"
    )


def test_losses_that_were_rounded_away(tmp_path):
    entries = [ORDINARY | {"loss": 0.0, "grad_norm": 0.01 * step, "kl": 1e-3} for step in range(1, 23)]
    found, _ = only(report_of(trainer_state(tmp_path, *entries)), "RDG002")
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    assert "22 have a nonzero gradient" in found.headline
    assert "the gradient norm is up to 0.22" in found.message
    # 1e-4 / 2 / 1e-3
    assert "coefficient is below 0.05" in found.message
    entries[3]["loss"] = -0.0004
    found, _ = only(report_of(trainer_state(tmp_path, *entries)), "RDG002")
    assert "coefficient" not in found.message
    entries[3]["loss"] = 0.00041234
    assert outcomes(report_of(trainer_state(tmp_path, *entries)))["RDG002"] == "clean"
    found, _ = only(report_of(trainer_state(tmp_path, *entries[:3])), "RDG002")
    assert "3 have a nonzero gradient" in found.headline
    found, _ = only(report_of(trainer_state(tmp_path, *entries[:1])), "RDG002")
    assert (found.severity.label, found.verdict) == ("info", "confirmed")


def test_a_gradient_that_never_arrives(tmp_path):
    still = ORDINARY | {"grad_norm": 0.0, "loss": 0.0}
    found, _ = only(report_of(trainer_state(tmp_path, *[still] * 4)), "RDG002")
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert (
        found.headline
        == "the gradient norm is 0 in all 4 steps with reward variance: no gradient reaches the parameters"
    )
    # One step with a gradient: the path is whole.
    assert "RDG002" not in [one.code for one in report_of(trainer_state(tmp_path, *[still] * 4, ORDINARY)).findings]


def test_a_gradient_of_0_that_is_none_of_the_path(tmp_path):
    still = ORDINARY | {"grad_norm": 0.0, "loss": 0.0}
    # Means of the variance over five steps, and the norm of the last one.
    healthy = [still if step % 2 else ORDINARY for step in range(40)]
    assert outcomes(report_of(every(5, trainer_state(tmp_path, *healthy))))["RDG002"] == "clean"
    report = report_of(every(5, trainer_state(tmp_path, *[still] * 8)))
    assert "RDG002" not in [one.code for one in report.findings]
    # Responses that were cut off may be masked.
    cut = still | {"completions/clipped_ratio": 1.0}
    assert "RDG002" not in [one.code for one in report_of(trainer_state(tmp_path, *[cut] * 4)).findings]
    # Reused generations log the share with the first of their steps alone.
    silent = {name: value for name, value in still.items() if name != "frac_reward_zero_std"}
    assert "RDG002" not in [one.code for one in report_of(trainer_state(tmp_path, *[silent] * 4)).findings]


def test_a_run_that_is_dead_throughout(tmp_path):
    dead = REWARD_FREE | {"grad_norm": 0.0, "loss": 0.0}
    found, _ = only(report_of(trainer_state(tmp_path, *[dead] * 12)), "RDG002")
    assert found.severity.label == "warning"
    assert "no group had reward variance" in found.message


def verl_log(folder, *norms):
    lines = [
        json.dumps({"step": step, "data": {"actor/pg_loss": 0.01, "actor/grad_norm": norm}})
        for step, norm in enumerate(norms, start=1)
    ]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "log.jsonl"


@pytest.mark.parametrize("trainer", [None, "verl"])
def test_a_verl_log_is_judged_without_its_estimator(tmp_path, trainer):
    found, _ = only(report_of(verl_log(tmp_path, 0.5, float("inf"), 0.5), trainer=trainer), "RDM003")
    assert found.severity.label == "error"
    assert found.examples[0].step == 2


ROWS_OF_A_LOG = [{"step": 1, **ORDINARY}, {"step": 2, **REWARD_FREE}]


def as_csv(folder):
    names = list(ROWS_OF_A_LOG[0])
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in ROWS_OF_A_LOG)]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    return folder / "log.csv"


def as_long_lines(folder):
    path = folder / "run.metrics.jsonl"
    entries = [
        {"step": row["step"], "split": "train", "name": name, "value": value}
        for row in ROWS_OF_A_LOG
        for name, value in row.items()
        if name != "step"
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def as_parquet(folder):
    from rolloutdoctor.io.write.writer import write_metrics

    path = folder / "run.metrics.parquet"
    write_metrics(
        path, [(row["step"], "train", name, row[name]) for row in ROWS_OF_A_LOG for name in row if name != "step"]
    )
    return path


def as_folder(folder):
    trainer_state(folder, ORDINARY, REWARD_FREE)
    return folder


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("written", [as_csv, as_long_lines, as_parquet, as_folder])
def test_every_container_says_the_same(tmp_path, written):
    expected = report_of(trainer_state(tmp_path, ORDINARY, REWARD_FREE))
    (tmp_path / "other").mkdir()
    report = report_of(written(tmp_path / "other"))
    assert report.findings == expected.findings
    assert report.clean == expected.clean


def test_a_real_trl_log_alone():
    with opened(DATA / "trl" / "mixed" / "trainer_state.json") as run:
        found = describe(run, CheckOptions())
    assert found.tier == 0
    assert {"RDG003", "RDM003"} <= {code for code, _ in found.runnable}
    for skipped in found.skipped:
        if skipped.code != "RDG004" and find(skipped.code).needs_rows:
            assert "rolloutdoctor.recorders.trl" in skipped.remedy


def test_real_trl_steps_without_reward():
    """Steps 1, 3 and 5 had equal rewards and beta was 0.04; at step 1 policy and reference were the same."""
    path = DATA / "trl" / "reward_free" / "trainer_state.json"
    found, value = only(report_of(path), "RDG003")
    assert (value["reward_free_steps"], value["dead_steps"]) == (3, 1)
    assert {example.step for example in found.examples} == {3, 5}
    assert value["loss_by_kl_low"] == pytest.approx(0.04, rel=1e-6)
    assert value["loss_by_kl_high"] == pytest.approx(0.04, rel=1e-6)
    assert 0 < value["grad_norm_ratio"] < 0.01
    found, value = only(report_of(path, "beta=0.04", "logging_steps=1", trainer="trl"), "RDG004")
    assert {example.step for example in found.examples} == {3, 5}
    assert value["largest_policy_loss"] < 1e-6 * value["loss"]


def test_other_commands_still_ask_for_rollouts(tmp_path):
    path = trainer_state(tmp_path, ORDINARY)
    with (
        pytest.raises(InputError, match="logged metrics, not rollouts"),
        open_any([str(path)], trainer=None, options=ConvertOptions(), tell=lambda text: None),
    ):
        pass


@pytest.mark.parametrize("options", [(), ("beta=0.04",)])
def test_a_log_alone_is_measured_as_steps_without_rows_are(tmp_path, options):
    """One way imports no torch, and the other goes through batches, as pictures do."""
    rows = [
        {"step": n, "loss": 0.04 * 0.1, "kl": 0.1, "grad_norm": 0.5, "reward": 0.1 * n, "frac_reward_zero_std": n % 2}
        for n in range(1, 25)
    ]
    trainer_state(tmp_path, *rows, {"step": 24, "eval_loss": 0.1, "eval_reward": 0.3})
    layers = [read_settings(options, "command line")]
    with opened(tmp_path) as run:
        ready = prepare(run, CheckOptions(trainer="trl" if options else None, layers=layers))
        by_batches = RuleAccumulator(ready.plan)
        run_file_steps(run, [by_batches], ready.options, ready.metrics)
        state = measure(ready)
    assert len(state.frames["metrics"]) > 24
    assert by_batches.state() == state


@pytest.mark.parametrize(("release", "found"), [("1.16.0", ["RDI014"]), ("0.10", []), ("99.0", [])])
def test_a_release_that_was_not_read_refutes_no_option(tmp_path, release, found):
    path = trainer_state(tmp_path, *[{"loss": 0.0, "grad_norm": 1.0, "reward": 0.5, "kl": 0.05}] * 4)
    report = rd.check(path, select=["RDI014"], trainer=f"trl@{release}", options={"beta": 0.0})
    assert [one.code for one in report.findings] == found
    assert not [one for one in report.clean if found != ["RDI014"]]
