"""The identities of the trainers' metrics: silent on real logs, and a contradiction is found with its step."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rolloutdoctor as rd
from rolloutdoctor.metric_names.identities import IDENTITIES, Identity
from rolloutdoctor.metric_names.table import TRAINERS
from rolloutdoctor.testing import diagnose_log

HERE = Path(__file__).resolve().parents[1]
MADE = {run["name"]: run for run in json.loads((HERE / "data" / "logs.json").read_text())}
"""By `data/make_logs.py`."""
SLIME = {run["name"]: run for run in json.loads((HERE.parent / "parity" / "data" / "slime_runs.json").read_text())}
HEALTHY = [name for name in SLIME if name.startswith("healthy") and "flat" not in name]


def checked(folder, run, lines=None):
    """Check a stored log with its options stated."""
    lines = run.get("lines") if lines is None else lines
    if lines is None:
        path = folder / "train.log"
        path.write_text(run["printed"])
    elif run["trainer"].startswith("trl"):
        path = folder / "trainer_state.json"
        path.write_text(json.dumps({"log_history": lines}))
    else:
        path = folder / "log.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rd.check(path, trainer=run["trainer"], options=run["options"], select=["RDM008"])


def slime(name):
    """A run of slime's real functions, in the form of the other stored logs."""
    run = SLIME[name]
    lines = [{"step": at + 1, **line} for at, line in enumerate(run["metrics"])]
    return {"trainer": "slime@0.3.1", "options": {**run["options"], "entropy_coef": 0.0}, "lines": lines}


@pytest.mark.slow
def test_real_logs_do_not_contradict_themselves(tmp_path):
    tested = 0
    for name, run in [*MADE.items(), *((name, slime(name)) for name in HEALTHY)]:
        report = checked(tmp_path, run)
        assert not report.findings, (name, report.findings[0].message)
        assert [code for code, _ in report.clean] == ["RDM008"], name
        tested += 1
    assert tested > 20


RISES = 3
"""Line from which on a planted metric is another."""


def planted(run, metric, change):
    return [
        line if at < RISES or metric not in line else {**line, metric: change(line[metric])}
        for at, line in enumerate(run["lines"])
    ]


PLANTED = {
    "another clip fraction": ("TRL: one function, two updates a batch", "clip_ratio/region_mean", lambda x: x + 0.01),
    "a mean above the largest": ("TRL: windows of three steps", "completions/mean_length", lambda x: x + 20),
    "a smallest above the mean": ("TRL: windows of three steps", "completions/min_terminated_length", lambda x: x + 20),
    "another weight": ("TRL: two functions, a sampler", "reward", lambda x: 1.6 * x),
    "a reward that is the sum of nothing": ("TRL: one function, two updates a batch", "reward", lambda x: x + 0.01),
    "a share of other groups": ("TRL: two functions, a sampler", "frac_reward_zero_std", lambda x: x + 0.1),
    "a share of other responses": (
        "TRL: two functions, a sampler",
        "completions/clipped_ratio",
        lambda x: 0.8 * x + 0.01,
    ),
    "a mean weight above the largest": (
        "TRL: two functions, a sampler",
        "sampling/importance_sampling_ratio/mean",
        lambda x: 2 * x,
    ),
    "a KL loss with another coefficient": ("verl: KL in the loss", "actor/loss", lambda x: x + 0.01),
    "a score that is no reward": ("verl: KL in the loss", "critic/score/mean", lambda x: x + 0.1),
    "a score above its largest": ("verl: KL in the reward", "critic/score/mean", lambda x: x + 99),
    "perplexities that differ by something else": (
        "verl: weights of tokens",
        "rollout_corr/log_ppl_diff",
        lambda x: x + 1e-3,
    ),
    "an effective sample size above 1": (
        "verl: weights of sequences",
        "rollout_corr/rollout_is_eff_sample_size",
        lambda x: x + 1,
    ),
    "a longest response of others": ("verl: KL in the reward", "response_length/max", lambda x: x + 1),
}


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_with_its_first_step(name, tmp_path):
    kind, metric, change = PLANTED[name]
    run = MADE[kind]
    lines = planted(run, metric, change)
    (found,) = checked(tmp_path, run, lines).findings
    is_exact = "eff_sample_size" not in metric
    assert (found.severity.label, found.verdict) == (("error", "confirmed") if is_exact else ("warning", "exposed"))
    assert found.onset == next(line for line in lines[RISES:] if metric in line)["step"]
    assert metric in found.message
    assert metric in found.examples[0].note


@pytest.mark.parametrize("name", [name for name in SLIME if name.startswith("metric times 3")])
def test_a_metric_of_slime_times_three(name, tmp_path):
    (found,) = checked(tmp_path, slime(name)).findings
    assert found.severity.label == "error"


CONSOLE = """\
step:0 - actor/pg_loss:-0.005 - actor/grad_norm:1.992 - critic/returns/mean:{mean} - critic/returns/max:{most} - \
critic/returns/min:0.000 - critic/score/mean:0.004 - critic/score/max:1.000 - critic/score/min:0.000
step:1 - actor/pg_loss:-0.003 - actor/grad_norm:1.827 - critic/returns/mean:0.000 - critic/returns/max:0.000 - \
critic/returns/min:0.000 - critic/score/mean:0.002 - critic/score/max:1.000 - critic/score/min:0.000
"""
"""The log in verl's documentation. In release 0.1 a mask of integers indexed: the largest is of the first two rows."""


@pytest.mark.parametrize(("mean", "most", "is_found"), [("0.003", "0.000", True), ("0.001", "0.000", False)])
def test_a_printed_log_is_compared_within_its_last_digit(mean, most, is_found, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(CONSOLE.format(mean=mean, most=most))
    assert bool(rd.check(path, select=["RDM008"]).findings) == is_found


PUBLIC = {
    "https://github.com/verl-project/verl/issues/7412": "step:34 - actor/entropy:0.22266578674316406 - "
    "actor/pg_clipfrac:0.0007935191160472839 - actor/ppo_kl:-8.163164312320433e-06 - "
    "actor/pg_loss:0.042396901015308686 - actor/kl_loss:0.0013280365410537343 - actor/loss:0.042398229241371155 - "
    "critic/score/mean:-0.0182796623557806 - critic/score/max:1.0 - critic/score/min:-1.0 - "
    "critic/rewards/mean:-0.0182796623557806 - critic/rewards/max:1.0 - critic/rewards/min:-1.0 - "
    "critic/advantages/mean:-0.0423407182097435 - critic/advantages/max:1.7888524532318115 - "
    "critic/advantages/min:-1.7888524532318115 - response_length/mean:1267.024169921875 - "
    "response_length/max:3072.0 - response_length/min:38.0",
    "https://github.com/verl-project/verl/issues/316": "step:5 - actor/kl_loss:0.071 - actor/entropy_loss:5.683 - "
    "actor/pg_loss:0.000 - actor/pg_clipfrac:0.000 - actor/ppo_kl:0.002 - actor/grad_norm:0.180 - "
    "critic/score/mean:0.008 - critic/score/max:1.000 - critic/score/min:0.000 - critic/rewards/mean:0.008 - "
    "critic/rewards/max:1.000 - critic/rewards/min:0.000 - critic/advantages/mean:-0.002 - "
    "critic/advantages/max:1.789 - critic/advantages/min:-0.730 - response_length/mean:684.393 - "
    "response_length/max:1024.000 - response_length/min:3.000 - response_length/clip_ratio:0.521",
    "https://github.com/THUDM/slime/issues/1837": "perf 0: {'rollout/response_len/mean': 2773.71484375, "
    "'rollout/response_len/median': 2837.5, 'rollout/response_len/max': 4096, 'rollout/response_len/min': 593, "
    "'rollout/truncated_ratio': 0.46484375}",
    "https://github.com/Chi-Shan0707/TinyLoRA-GRPO-Coder/issues/4": "{'loss': -0.0982, 'grad_norm': 0.12353515625, "
    "'learning_rate': 1e-05, 'completions/mean_length': 506.75, 'completions/min_length': 214.0, "
    "'completions/max_length': 738.0, 'completions/clipped_ratio': 0.0, 'completions/mean_terminated_length': 506.75, "
    "'completions/min_terminated_length': 214.0, 'completions/max_terminated_length': 738.0, "
    "'rewards/code_reward_func/mean': 0.5, 'reward': 0.5, 'reward_std': 0.32513731718063354, "
    "'frac_reward_zero_std': 0.0, 'clip_ratio/low_mean': 0.0, 'clip_ratio/high_mean': 0.0, "
    "'clip_ratio/high_max': 0.0, 'clip_ratio/region_mean': 0.0, 'epoch': 0.03}",
    "TRL, means over fifty steps": "{'loss': 0.004, 'grad_norm': 0.0, 'learning_rate': 4.816394848033313e-06, "
    "'completions/mean_length': 4.88375, 'completions/min_length': 3.22, 'completions/max_length': 6.04, "
    "'completions/clipped_ratio': 0.00125, 'completions/mean_terminated_length': 4.879899187088013, "
    "'completions/min_terminated_length': 3.22, 'completions/max_terminated_length': 5.96, "
    "'rewards/reward_fn/mean': -0.03332650117576122, 'reward': -0.03332650117576122, "
    "'reward_std': 0.0014054529479471966, 'frac_reward_zero_std': 0.79, 'clip_ratio/low_mean': 0.0, "
    "'clip_ratio/high_mean': 0.0, 'clip_ratio/high_max': 0.0, 'clip_ratio/region_mean': 0.0, 'epoch': 0.03}",
}
"""Lines of public logs."""


@pytest.mark.parametrize("origin", PUBLIC)
def test_public_logs_do_not_contradict_themselves(origin, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(2 * f"{PUBLIC[origin]}\n")
    report = rd.check(path, select=["RDM008"])
    assert [code for code, _ in report.clean] == ["RDM008"], (report.findings, report.skipped)


def test_an_option_that_nothing_states_contradicts_nothing(tmp_path):
    """Other weights from the first line on are the run's own; weights that change in mid-run are none."""
    kind, metric, change = PLANTED["another weight"]
    run = MADE[kind]
    unstated = {**run, "trainer": "trl", "options": {}}
    whole = [{**line, metric: change(line[metric])} for line in run["lines"]]
    (tmp_path / "whole").mkdir()
    assert not checked(tmp_path / "whole", unstated, whole).findings
    (finding,) = checked(tmp_path, unstated, planted(run, metric, change)).findings
    assert (finding.code, finding.severity.label, finding.verdict) == ("RDM008", "warning", "exposed")


def test_means_over_several_batches_are_no_whole_numbers_of_groups(tmp_path):
    run = MADE["TRL: windows of three steps"]
    lines = planted(run, "frac_reward_zero_std", lambda x: x / 2 + 0.01)
    assert not checked(tmp_path, run, lines).findings


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 1), ({"gradient_accumulation_steps": 4}, 0), ({"logging_steps": 3}, 0), ({"generation_batch_size": None}, 0)],
)
def test_whole_numbers_are_those_of_one_generated_batch(options, count, tmp_path):
    """A step that takes two batches logs their mean."""
    kind, metric, change = PLANTED["a share of other groups"]
    run = MADE[kind]
    changed = {**run, "options": {**run["options"], **options}}
    assert len(checked(tmp_path, changed, planted(run, metric, change)).findings) == count


def test_a_missing_reward_explains_less_and_not_more(tmp_path):
    """A function that returned None is in the mean of fewer rows than the sum."""
    run = MADE["TRL: two functions, a sampler"]
    for factor, count in ((0.8, 0), (1.5, 1)):
        lines = planted(run, "reward", lambda x, factor=factor: factor * x)
        assert len(checked(tmp_path, run, lines).findings) == count


@pytest.mark.parametrize(
    ("factors", "weights", "count"),
    [
        ((2, 2, 2), None, 0),
        ((2, 2, 2), [1.0, 1.0], 0),
        ((1, 1, 2), [1.0, 1.0], 0),
        ((1, 2, 2), None, 0),
        ((1, 1, 2), None, 1),
        ((2, 2, 2), [1.0], 1),
    ],
)
def test_functions_with_one_name_share_a_metric(factors, weights, count, tmp_path):
    """TRL logs their mean under it, while the reward is their sum."""
    run = MADE["TRL: one function, two updates a batch"]
    run = {**run, "options": {**run["options"], "reward_weights": weights}}
    lines = [
        {**line, "rewards/_answers/mean": mean, "reward": factor * mean, "reward_std": 0.5}
        for line, factor, mean in zip(run["lines"], factors, (0.25, 0.5, 0.375), strict=False)
    ]
    assert len(checked(tmp_path, run, lines).findings) == count


def test_functions_with_two_names_may_be_more(tmp_path):
    """Without weights nothing says that they are two."""
    run = MADE["TRL: two functions, a sampler"]
    lines = planted(run, "reward", lambda x: 1.6 * x)
    for weights, count in ((None, 0), ([1.0, 0.5, 0.5], 0), ([1.0, 0.5], 1)):
        changed = {**run, "options": {**run["options"], "reward_weights": weights}}
        assert len(checked(tmp_path, changed, lines).findings) == count


def test_another_trainer_derived_from_trls(tmp_path):
    """What TRL generates is TRL's in Unsloth, too; its reward is not held against TRL's release."""
    line = {"loss": 0.1, "grad_norm": 1.0, "reward": 0.5, "completion_length": 9.0, "completions/min_length": 1.0}
    line |= {"rewards/shade/mean": 9.0, "reward_std": 0.1}
    for mean, count in ((5.0, 0), (99.0, 1)):
        lines = [{"step": at, **line, "completions/mean_length": mean, "completions/max_length": 9.0} for at in (1, 2)]
        run = {"trainer": "trl@1.16.0", "options": {"reward_weights": [1.0]}}
        assert len(checked(tmp_path, run, lines).findings) == count


SHARES = st.floats(0, 0.3, allow_subnormal=False)
PRINTED = {"whole": "{}", "transformers": "{:.4g}", "three decimals": "{:.3f}", "single": None}


@pytest.mark.slow(every=True)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(SHARES, SHARES), min_size=3, max_size=9), st.sampled_from([*PRINTED]), st.integers(0, 99))
def test_no_rounding_of_a_log_contradicts_it(shares, form, seed):
    """The sum is made before either part is rounded; entropies tell how a log of few numbers is printed."""

    def printed(value):
        if PRINTED[form] is None:
            return float(np.float32(value))
        return float(PRINTED[form].format(value))

    low, high = zip(*shares, strict=True)
    columns = {
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "clip_fraction": [one + other for one, other in shares],
        "entropy": np.random.default_rng(seed).uniform(0.1, 2, len(low)),
    }
    log = {name: [printed(value) for value in values] for name, values in columns.items()}
    assert diagnose_log("RDM008", "trl", **log) == "RDM008 clean"


def test_what_is_not_a_number_is_not_compared():
    for odd in (float("nan"), float("inf"), 1e300):
        parts = {"clip_fraction_low": [odd] * 4, "clip_fraction_high": [odd] * 4}
        found = diagnose_log("RDM008", "trl", clip_fraction=[0.1] * 4, **parts)
        assert found.startswith("RDM008 " + ("error" if odd == 1e300 else "clean")), found


def test_the_table_names_trainers_and_reads_as_it_is_written():
    assert set(IDENTITIES) <= set(TRAINERS)
    for table in IDENTITIES.values():
        for one in table:
            words = {word.strip("[]") for word in one.text.split()} - {"within", "whole"}
            names = {word for word in words if word[0] != "{" and any(map(str.isalpha, word))}
            assert list(one.relations_in({name.replace("*", "x") for name in names})), one.text
            assert one.source.endswith(tuple("abcdefghijklmnopqrstuvwxyz"))


def test_a_term_that_is_not_logged_is_0_only_in_brackets():
    one = Identity("loss = pg [- {coef} * entropy] [+ kl]", "")
    assert [found.words for found in one.relations_in({"loss", "pg", "kl"})] == ["loss = pg + kl"]
    assert not list(one.relations_in({"loss", "kl"}))


def test_without_identities_nothing_is_said():
    assert "RDM008 skipped: no known identity connects" in diagnose_log("RDM008", learning_rate=[1e-6] * 3)


@pytest.mark.parametrize(
    ("lengths", "others"),
    [((20, 10, 30), ""), ((20, 10, 15), "; 1 other identity fails"), ((20, 25, 15), "; 2 other identities fail")],
)
def test_other_identities_that_fail_are_counted(tmp_path, lengths, others):
    """Length: mean, smallest and largest."""
    names = [f"completions/{name}_length" for name in ("mean", "min", "max")]
    shares = {"clip_ratio/low_mean": 0.1, "clip_ratio/high_mean": 0.2, "clip_ratio/region_mean": 0.5}
    line = {**shares, **dict(zip(names, lengths, strict=True))}
    run = {"trainer": "trl", "options": {}, "lines": [{"step": step, **line} for step in range(1, 6)]}
    [finding] = checked(tmp_path, run).findings
    assert finding.message.partition("0.5 and 0.3")[2] == others


@pytest.mark.parametrize("missing", ["loss", "policy_loss", "entropy"])
def test_a_sum_of_which_a_metric_is_missing_is_none(missing):
    log = {name: [0.1, 0.2] * 10 for name in ("loss", "policy_loss", "entropy") if name != missing}
    assert diagnose_log("RDM008", "trl", **log).endswith("no known identity connects the metrics of this log")


@pytest.mark.parametrize(("same", "is_found"), [(1, False), (2, True)])
def test_two_lines_show_that_no_functions_share_a_name(tmp_path, same, is_found):
    """TRL averages the metrics of functions with one name: one line in which it is the reward may be chance."""
    run = MADE["TRL: one function, two updates a batch"]
    lines = [line for line in run["lines"] if "reward" in line]
    lines = [line if at < same else {**line, "reward": line["reward"] + 0.01} for at, line in enumerate(lines)]
    assert bool(checked(tmp_path, run, lines).findings) == is_found
