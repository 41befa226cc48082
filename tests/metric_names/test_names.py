"""The tables of metric names hold together, and say of real and made-up logs who wrote them and what is in them."""

import itertools
import json
from pathlib import Path

import polars as pl
import pytest

import rolloutdoctor
from rolloutdoctor.commands.explain import metrics
from rolloutdoctor.metric_names.generic import generic, taken_for
from rolloutdoctor.metric_names.name import MetricName, ordered
from rolloutdoctor.metric_names.quantities import BY_NAME, QUANTITIES
from rolloutdoctor.metric_names.table import (
    SAME,
    TRAINERS,
    find,
    functions,
    metric_quantities,
    taken_names,
    understood,
    whose,
    writers,
)
from rolloutdoctor.metric_names.training_kind import NOT_CHECKED, training_kind, unrecognised
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.table import trainer_from_metric_names
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS
from rolloutdoctor.views.verdict import verdict

ROOT = Path(__file__).parents[2]
IMPORTED = ROOT / "tests" / "importers" / "data"
EVERY = [(trainer, one) for trainer in TRAINERS for one in TRAINERS[trainer]]


def examples(one):
    return [f"{head}{'some' if star else ''}{tail}" for head, star, tail in one.spellings]


def newest(trainer):
    """Names that the newest release of a trainer logs."""
    return {examples(one)[0] for one in TRAINERS[trainer] if not one.until}


def quantities(names, **options):
    return {quantity: name for quantity, (name, _) in understood(names, **options).items()}


def test_quantities_have_one_name_each():
    assert len(BY_NAME) == len(QUANTITIES)


def test_every_metric_is_whole():
    for trainer, one in EVERY:
        where = f"{trainer}: {one.pattern}"
        assert one.quantity in BY_NAME, where
        assert one.definition, where
        assert "/" in one.source, where
        assert one.pattern.count("*") <= 1, where
        assert all(one.matches(name) for name in examples(one)), where
        assert not one.until or ordered(one.since) < ordered(one.until), where
        assert one.factor, where


def test_releases_are_in_the_order_of_numbers():
    assert ordered("0.9") < ordered("0.20.dev0") < ordered("v1.9.0") == ordered("1.9") < ordered("1.10.0rc1")
    assert ordered("2025.10.12") < ordered("2026.2")
    assert ordered("") == ()
    one = MetricName("kl", "kl", "", "", since="0.6.1", until="0.8")
    found = [release for release in ("0.6", "0.6.1", "0.7.3", "0.8.0.dev0", "0.9") if one.logged_at(release)]
    assert found == ["0.6.1", "0.7.3"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_name_has_one_meaning_in_a_release(trainer):
    for one, other in itertools.combinations(TRAINERS[trainer], 2):
        apart = [a.until and ordered(a.until) <= ordered(b.since) for a, b in ((one, other), (other, one))]
        if not any(apart):
            assert not any(other.matches(name) for name in examples(one)), (one, other)
            assert not any(one.matches(name) for name in examples(other)), (one, other)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_all_names_of_a_release_are_its_own(trainer):
    names = newest(trainer)
    assert set(quantities(names, trainer=trainer)) == {one.quantity for one in TRAINERS[trainer] if not one.until}
    if trainer == "miles":
        assert whose(names) == "slime"
        names |= {"train/ess_ratio"}
    if trainer == "llama-factory":
        assert whose(names) is None
        names |= {"percentage"}
    assert whose(names) == trainer


def test_names_that_anybody_may_choose_are_no_trainers():
    names = {"loss", "lr", "reward"}
    assert whose(names) is None
    assert whose(names | {"total_steps", "percentage"}) == "llama-factory"
    # A mark tells nothing where there is no reward.
    assert whose({"lm_loss", "grad_norm", "learning_rate", "consumed_samples"}) is None
    assert whose({"reward", "kl", "grad_norm", "consumed_samples"}) == "ms-swift"


OF_ANY_LOOP = (
    {"train/loss", "train/reward", "train/lr"},
    {"loss", "reward", "kl", "grad_norm"},
    {"loss", "reward", "response_length", "clip_frac", "value_loss"},
    # The words of OpenRLHF's and verl's names, in another order or with other marks between them.
    {"rollout_reward_mean", "rollout_reward_std", "mean_response_length", "gradient_norm"},
    {"rollout/reward", "rollout/reward_mean", "rollout/reward_std", "train/loss"},
)


@pytest.mark.parametrize("names", OF_ANY_LOOP)
def test_what_any_loop_logs_tells_no_trainer_and_hides_nothing(names):
    assert whose(names) is None
    assert trainer_from_metric_names(names) is None
    assert quantities({"train/loss", "train/lr", "train/reward_mean"})["reward"] == "train/reward_mean"


@pytest.mark.parametrize("trainer", [None, "nemo-rl"])
def test_a_trainer_hides_no_metric_of_a_plain_meaning(trainer):
    names = {"train/loss", "train/gen_kl_error", "train/reward_mean", "train/response_length", "kl"}
    found = quantities(names, trainer=trainer)
    assert (found["reward"], found["response_length"]) == ("train/reward_mean", "train/response_length")
    # Of several estimators of the KL a trainer that is stated has its own.
    assert ("kl" in found) == (trainer is None)


SHARED = ("reward", "reward_std", "kl", "loss", "clip_ratio/low_mean", "completions/mean_length")


@pytest.mark.parametrize(
    ("more", "likely"),
    [
        ((), ("trl", "ms-swift")),
        (("num_tokens",), ("trl",)),
        (("completions/mean_terminated_length",), ("trl",)),
        (("memory(GiB)", "train_speed(s/it)"), ("ms-swift",)),
        (("entropy/mean",), ("ms-swift",)),
        (("completion_length",), ("unsloth",)),
    ],
)
def test_names_that_two_trainers_share_are_decided_by_those_that_one_has(more, likely):
    assert writers({*SHARED, *more}) == likely


def test_a_log_whose_names_two_trainers_share_names_both(tmp_path):
    lines = ({"step": step, **dict.fromkeys(SHARED, 0.1 + 0.01 * step)} for step in range(1, 13))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = rolloutdoctor.check(tmp_path / "log.jsonl")
    assert report.likely_trainers == ("trl", "ms-swift")
    assert "trl or ms-swift (inferred from metric names)" in RENDERERS["full"](report, Style(width=100))


def recorded():
    """Names in the logs of real trainings, and in those that the samples have."""
    for path in sorted(IMPORTED.glob("trl/*/trainer_state.json")):
        lines = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        yield pytest.param("trl", {name for line in lines for name in line}, id=path.parent.name)
    text = (ROOT / "tests" / "parity" / "data" / "slime_runs.json").read_text(encoding="utf-8")
    yield pytest.param(
        "slime", {name for run in json.loads(text) for step in run["metrics"] for name in step}, id="slime"
    )
    for sample, trainer in (("run", "trl"), ("healthy", "trl"), ("slime_ppo", "slime"), ("verl_rejected", "verl")):
        names = pl.read_parquet(ROOT / "sample_data" / f"{sample}.metrics.parquet")["name"].unique()
        yield pytest.param(trainer, set(names), id=sample)


EXPECTED = {
    "trl": {
        "reward": "reward",
        "held_out_reward": "eval_reward",
        "reward_std": "reward_std",
        "zero_variance_share": "frac_reward_zero_std",
        "entropy": "entropy",
        "kl": "kl",
        "loss": "loss",
        "grad_norm": "grad_norm",
        "clip_fraction": "clip_ratio/region_mean",
        "clip_fraction_low": "clip_ratio/low_mean",
        "clip_fraction_high": "clip_ratio/high_mean",
        "clip_low_min": "clip_ratio/low_min",
        "clip_high_max": "clip_ratio/high_max",
        "response_length": "completions/mean_length",
        "response_length_min": "completions/min_length",
        "response_length_max": "completions/max_length",
        "truncated_share": "completions/clipped_ratio",
        "learning_rate": "learning_rate",
        "tokens_seen": "num_tokens",
        "step_time": "step_time",
    },
    "slime": {
        "reward": "rollout/raw_reward",
        "advantage": "rollout/advantages",
        "return": "rollout/returns",
        "entropy": "train/entropy_loss",
        "kl": "train/kl_loss",
        "loss": "train/loss",
        "policy_loss": "train/pg_loss",
        "clip_fraction": "train/pg_clipfrac",
        "ppo_kl": "train/ppo_kl",
        "sampler_logp_gap": "train/train_rollout_logprob_abs_diff",
        "response_length": "rollout/response_lengths",
        "truncated_share": "rollout/truncated",
    },
    "verl": {
        "reward": "critic/score/mean",
        "reward_min": "critic/score/min",
        "reward_max": "critic/score/max",
        "penalised_reward": "critic/rewards/mean",
        "penalised_reward_min": "critic/rewards/min",
        "penalised_reward_max": "critic/rewards/max",
        "advantage": "critic/advantages/mean",
        "advantage_min": "critic/advantages/min",
        "advantage_max": "critic/advantages/max",
        "return": "critic/returns/mean",
        "kl": "actor/kl_loss",
        "kl_coefficient": "actor/kl_coef",
        "policy_loss": "actor/pg_loss",
        "clip_fraction": "actor/pg_clipfrac",
        "ppo_kl": "actor/ppo_kl",
        "response_length": "response_length/mean",
        "response_length_min": "response_length/min",
        "response_length_max": "response_length/max",
        "truncated_share": "response_length/clip_ratio",
        "sampler_kl": "rollout_corr/kl",
        "sampler_k3": "rollout_corr/k3_kl",
        "sampler_ppl": "rollout_corr/rollout_ppl",
        "trainer_ppl": "rollout_corr/training_ppl",
    },
}
OTHERS = ("eval_", "train_", "rewards/", "total_flos", "epoch", "critic/", "prompt_length/", "rollout_corr/rollout_rs_")
WITHOUT = {
    *("step", "actor/pg_clipfrac_lower", "response/aborted_ratio"),
    *(f"completions/{one}_terminated_length" for one in ("mean", "min", "max")),
    *(f"rollout_corr/{one}" for one in ("chi2_seq", "chi2_token", "ppl_ratio", "rollout_log_ppl", "training_log_ppl")),
    *(f"rollout/{one}" for one in ("rewards", "values", "kl", "response_lengths", "truncated")),
    *(f"rollout/{one}log_probs" for one in ("", "ref_", "rollout_")),
}
"""Recorded names of no canonical quantity."""


@pytest.mark.parametrize(("trainer", "names"), [*recorded()])
def test_recorded_logs_are_understood(trainer, names):
    assert whose(names) == trainer
    found = {name: one for name, one in quantities(names).items() if not name.startswith("function_")}
    expected = {quantity: name for quantity, name in EXPECTED[trainer].items() if name in names}
    if "train/kl_loss" not in names and "rollout/kl" in names:
        expected["kl"] = "rollout/kl"
    assert found == expected
    rest = {name for name in names - set(found.values()) - WITHOUT if not name.startswith(OTHERS)}
    assert all("response_length_non_aborted" in name or "log_ppl" in name for name in rest), rest


TRL_SUBSET = {"reward", "reward_std", "kl", "loss", "completions/mean_length", "frac_reward_zero_std"}


@pytest.mark.parametrize(
    ("names", "owner"),
    [
        ([], None),
        (["reward", "loss", "kl"], None),
        (["accuracy", "f1"], None),
        # One name may be anybody's.
        (["time/step"], None),
        (["loss", "reward", "learning_rate", "epoch"], None),
        # ms-swift logs all of these, too.
        (TRL_SUBSET, None),
        (TRL_SUBSET | {"num_tokens"}, "trl"),
        (TRL_SUBSET | {"completion_length"}, "unsloth"),
        (TRL_SUBSET | {"rollout_correction/kl"}, "ms-swift"),
        # TRL up to 0.16, Unsloth on it, and the first ms-swift.
        (["reward", "reward_std", "kl", "completion_length", "loss"], None),
        # verl and ROLL.
        (["critic/score/mean", "actor/pg_loss", "actor/kl_loss"], None),
        (["critic/score/mean", "actor/pg_loss", "response_length/mean"], "verl"),
        (["critic/score/mean", "actor/pg_loss", "token/response_length/mean"], "roll"),
        (["train/loss", "train/pg_loss", "rollout/raw_reward"], "slime"),
        (["train/loss", "train/pg_loss", "rollout/raw_reward", "train/ess_ratio", "train/train_rollout_kl"], "miles"),
        # The console and W&B.
        (["reward", "kl", "policy_loss", "response_length", "actor_lr"], "openrlhf"),
        (["train/reward", "train/kl", "train/policy_loss", "train/rollout/reward_mean"], "openrlhf"),
        (["train/reward", "train/loss", "train/probs_ratio_max", "train/gen_kl_error"], "nemo-rl"),
        (["reward/all/mean", "is_truncated/all/mean", "mismatch_kl/mean"], "prime-rl"),
    ],
    ids=lambda given: " ".join(sorted(given)) if isinstance(given, (list, set)) else str(given),
)
def test_who_wrote_a_log(names, owner):
    assert whose(names) == owner
    assert whose(list(reversed(list(names)))) == owner


def test_what_is_read_of_a_loop_is_not_called_unknown():
    names = {"rollout_reward_mean", "rollout_reward_std", "mean_response_length", "mine"}
    assert unrecognised(names) == ["mine"]
    assert {*taken_for(names)} == names - {"mine"}


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("skyrl.ai/grad_norm", "grad_norm"),
        ("train/grad_l2_norm", "grad_norm"),
        # It may be of the weights.
        ("l2_norm", None),
        ("rollout/tool_calls_avg", "tool_calls"),
        ("train_accuracies_avg", "accuracy"),
        ("val_accuracies_avg", "accuracy"),
        ("eval_acc", "accuracy"),
        ("val_grad_norm", None),
    ],
)
def test_names_of_loops(name, quantity):
    assert quantities({name}) == ({} if quantity is None else {quantity: name})
    # Beside a trainer that has no such metric it is read as well.
    of_trainer = {"env/all/reward/total", "env/all/by_group/frac_mixed", "optim/entropy"}
    found = quantities({name, *of_trainer}, trainer="tinker-cookbook")
    assert found.get(quantity) == (None if quantity is None else name)


def test_a_log_of_nobody_in_particular_is_understood_where_all_agree():
    assert quantities(["reward", "loss", "kl", "mine"]) == {"reward": "reward", "loss": "loss", "kl": "kl"}
    found = understood(["critic/score/mean", "critic/rewards/mean", "actor/pg_loss"])
    assert {quantity: name for quantity, (name, _) in found.items()} == {
        "reward": "critic/score/mean",
        "policy_loss": "actor/pg_loss",
    }
    one = found["policy_loss"][1]
    assert (one.definition, one.source) == (BY_NAME["policy_loss"].definition, "")
    # Unsloth logs 0 with beta 0, TRL logs nothing.
    assert understood(["kl"])["kl"][1].zero_when_off


def test_the_trainer_decides_what_a_name_means():
    names = ["kl", "reward", "completion_length"]
    assert "row" in understood(names, "unsloth")["kl"][1].definition
    assert not understood(names, "trl")["kl"][1].zero_when_off
    assert quantities(names, trainer="trl-rloo") == quantities(names, trainer="trl")
    assert quantities(names, trainer="a plug-in") == quantities(names)


def test_the_release_decides_what_a_name_means():
    old, new = (understood(["actor/pg_loss"], "verl", release)["policy_loss"][1] for release in ("0.7.1", "0.9.1"))
    assert "summed over all mini-batches" in old.definition
    assert "summed" not in new.definition
    assert understood(["actor/entropy"], "verl", "0.3.0") == {}
    # Without a release the newest comes first.
    assert understood(["reward_std"], "trl")["reward_std"][1].since == "0.27"


def test_values_become_canonical():
    mixed = understood(["env/all/by_group/frac_mixed", "optim/lr"], "tinker-cookbook")["zero_variance_share"][1]
    assert mixed.canonical(0.25) == 0.75
    drift = understood(["actor/policykl"], "roll")["ppo_kl"][1]
    assert drift.canonical(-0.5) == 0.5


def test_an_unknown_trainer_is_said_to_be_one():
    assert find("axolotl") is TRAINERS[SAME["axolotl"]]
    with pytest.raises(UsageError, match=r"no metric names of 'slim'.*did you mean 'slime'"):
        find("slim")


def test_the_command_lists_quantities_or_a_trainers_names():
    overview = metrics.listing()
    assert [line.split()[0] for line in overview.splitlines()[:-2] if not line.startswith(" ")] == list(BY_NAME)
    assert "verl: critic/score/mean; slime: rollout/raw_reward" in " ".join(overview.split())
    page = metrics.listing_of("verl").splitlines()
    assert "  actor/pg_loss  (from 0.7, before 0.8)" in page
    every = metrics.bodies()
    assert [(one["trainer"], one["pattern"]) for one in every] == [
        (trainer, one.pattern) for trainer, table in TRAINERS.items() for one in table
    ]


@pytest.mark.parametrize("trainer", ["trl", "unsloth", "ms-swift"])
def test_a_weight_at_its_cap_is_not_clipped(trainer):
    """Its token keeps its gradient, and the cap may be below 1."""
    assert set(understood(["cispo_clip_ratio"], trainer)) == {"is_truncated_share"}


@pytest.mark.parametrize("name", ["entropy_loss", "train/entropy_loss", "actor/entropy_loss"])
def test_the_sign_of_an_entropy_loss_is_that_of_a_trainer(name):
    """Stable-Baselines3 logs minus the entropy under a name that others have for the entropy."""
    assert "entropy" not in understood([name, "rollout/ep_rew_mean"])


def test_an_entropy_loss_of_a_trainer_is_the_entropy():
    names = ["actor/entropy_loss", "critic/score/mean", "response_length/mean", "response_length/clip_ratio"]
    assert understood(names)["entropy"][0] == "actor/entropy_loss"


@pytest.mark.parametrize("of", ["zero_adv_group", "dead_group", "dead_groups", "degenerate_groups", "zero_var"])
@pytest.mark.parametrize("share", ["fraction", "frac", "ratio", "share", "rate"])
def test_a_share_of_groups_that_train_nothing(of, share):
    for name in (f"{of}_{share}", f"train/{of}_{share}", f"{share}_{of}"):
        assert generic(name).quantity == "zero_variance_share"


def test_a_share_of_groups_of_ones_own_stands_beside_any_trainer():
    own = ["train/pg_loss", "train/kl_loss", "dead_group_frac"]
    assert understood(own, "slime")["zero_variance_share"][0] == "dead_group_frac"
    assert understood([*own, "frac_reward_zero_std"], "trl")["zero_variance_share"][0] == "frac_reward_zero_std"


@pytest.mark.parametrize("name", ["dead_groups", "zero_advantage", "n_dead_groups", "degenerate_groups", "zero_adv"])
def test_what_may_be_a_count_of_groups_is_no_share(name):
    assert generic(name) is None


@pytest.mark.parametrize(
    "name", ["advantage/zero_rate", "zero_adv_frac", "train/zero_advantage_ratio", "frac_zero_adv"]
)
def test_a_share_of_advantages_is_of_no_groups(name):
    assert generic(name) is None


def test_the_reward_of_selected_responses_is_the_reward_where_the_log_has_no_other():
    own = ["actor/ppo_ratio_clipfrac", "actor/total_loss", "reward/valid_rate", "reward/selected_mean"]
    assert understood(own)["reward"][0] == "reward/selected_mean"
    assert understood([*own, "critic/score/mean"])["reward"][0] == "critic/score/mean"


@pytest.mark.parametrize("total", ["rewards/reward/mean", "rewards/total/mean", "rewards/total_reward/mean"])
def test_a_function_that_is_called_the_reward_is_the_reward_where_the_log_has_no_other(total):
    own = ["loss", "rewards/json/mean", "rewards/json/std", total]
    assert understood(own)["reward"][0] == total
    assert understood(own, "trl")["reward"][0] == total
    assert understood([*own, "reward"])["reward"][0] == "reward"
    assert "reward" not in understood(own[:-1])


def test_the_ppo_trainers_of_trl():
    old = ["objective/kl", "ppo/returns/mean", "ppo/policy/advantages_mean", "ppo/mean_scores", "ppo/loss/total"]
    assert whose(old) == "trl-ppo"
    assert {*quantities(old)} == {"response_kl", "return", "advantage", "reward", "loss"}
    assert (
        quantities(["objective/scores", "objective/rlhf_reward", "lr"])["penalised_reward"] == "objective/rlhf_reward"
    )


@pytest.mark.parametrize("name", ["clip_frac_pct", "frac_zero_std_percent", "pct_truncated"])
def test_a_share_in_percent_is_none_of_those_that_are_compared_with_1(name):
    assert generic(name) is None


def test_a_mean_return_is_the_reward_where_no_other_is():
    assert quantities(["mean_ret", "loss", "kl"])["reward"] == "mean_ret"
    assert quantities(["mean_return", "reward", "kl"])["reward"] == "reward"


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("episode_scores", "reward"),
        ("rewards_per_episode", "reward"),
        ("percentage of correct examples", "accuracy"),
        ("dist_entropy", "entropy"),
        ("val_reward", "held_out_reward"),
        ("eval/reward_mean", "held_out_reward"),
        ("Reward/train_avg", "reward"),
        ("rewards_curve", "reward"),
        ("kl_values", "kl"),
        ("final_reward", "reward"),
        ("loss_at_step", "loss"),
        ("Loss/train", "loss"),
        ("Performance/train_win_rate_percent", "accuracy"),
    ],
)
def test_more_names_of_loops(name, quantity):
    assert generic(name.replace(" ", "_")).quantity == quantity


@pytest.mark.parametrize("name", ["gold", "gold_reward", "train/gold_score", "true_reward", "mean_gold_reward"])
def test_names_of_what_a_reward_stands_for(name):
    assert generic(name).quantity == "gold_reward"


def test_names_of_correctness_and_those_of_a_function_of_trl():
    for name in ("correctness", "reward/correctness_f", "train/correctness_reward", "correctness_reward_func"):
        assert generic(name).quantity == "correctness"
    assert "correctness" not in quantities(["reward", "rewards/correctness_reward_func", "completion_length", "kl"])


HELD_OUT = {"loss", "val_loss", "val_acc"}


@pytest.mark.parametrize(
    ("names", "is_supervised"),
    [
        (HELD_OUT, True),
        ({"train_loss", "train_acc", "val_loss", "val_accuracy", "lr"}, True),
        ({"loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"}, True),
        ({"loss", "test_loss", "accuracy"}, True),
        # A policy: by its reward, its KL, its entropy, its loss, or because nobody holds a loss out.
        (HELD_OUT | {"reward"}, False),
        (HELD_OUT | {"kl"}, False),
        (HELD_OUT | {"entropy"}, False),
        (HELD_OUT | {"policy_loss"}, False),
        ({"loss", "accuracy", "lr"}, False),
        ({"val_loss", "val_acc"}, False),
    ],
)
def test_a_held_out_loss_beside_an_accuracy_is_of_supervised_training(names, is_supervised):
    assert (training_kind(names) in NOT_CHECKED) == is_supervised


@pytest.mark.parametrize(
    ("evaluation", "loss", "is_checked"),
    [
        ({"eval_loss": 0.5, "eval_accuracy": 0.7}, 0.6, False),
        ({"eval_loss": 0.5, "eval_accuracy": 0.7}, -0.1, True),
        ({"eval_loss": 0.5, "eval_reward": 0.7, "eval_accuracy": 0.7}, 0.6, True),
        ({"eval_accuracy": 0.7}, 0.6, True),
    ],
)
def test_evaluations_with_a_loss_and_an_accuracy_are_of_supervised_training(tmp_path, evaluation, loss, is_checked):
    """The Trainer of transformers writes them beside the losses of a classifier or a reward model."""
    rows = [{"step": n, "loss": loss, "grad_norm": 0.5 + n / 7, "learning_rate": 1e-5} for n in range(1, 25)]
    state = {"log_history": [*rows, {"step": 12} | evaluation, {"step": 24} | evaluation]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    report = rolloutdoctor.check(tmp_path)
    assert (report.coverage.tested > 0) is is_checked
    assert ("This is a log of supervised training, which is not checked." in verdict(report)) is not is_checked


def test_reward_functions_that_an_export_wrote_with_underscores():
    names = ["reward", "rewards_right_func_mean", "rewards_right_func_std", "rewards_mean", "rewards_other_mean"]
    assert functions(names) == {"right_func": ("rewards_right_func_mean", "rewards_right_func_std")}
    assert metric_quantities(names)["rewards_right_func_std"] == "function_reward_std"


@pytest.mark.parametrize(
    ("names", "name"),
    [(["score", "kl_loss"], "kl_loss"), (["score", "kl_loss", "kl"], "kl"), (["loss", "kl_loss"], None)],
)
def test_a_kl_loss_is_the_kl_of_a_policy_that_has_a_reward_and_no_other(names, name):
    assert understood(names).get("kl", (None,))[0] == name
    assert (taken_names(names).get("kl_loss") == "KL") is (name == "kl_loss")


@pytest.mark.parametrize("name", ["truncated_rate", "train/truncation_rate", "truncated_fraction"])
def test_shares_of_truncated_responses(name):
    assert generic(name).quantity == "truncated_share"
    assert generic("truncated_ratio") is None, "may be an importance weight"


def test_a_letter_in_brackets_is_what_a_function_is_of():
    assert [generic(name) for name in ("S(r)", "Safety (r)")] == [None, None]
    assert generic("Mean Return (Reward)").quantity == "reward"


@pytest.mark.parametrize(
    ("name", "is_told"), [("reward", True), ("avg_reward", False), ("completions/mean_reward", True)]
)
def test_plain_names_beside_a_reward_of_a_name_of_its_own_tell_no_trainer(name, is_told):
    """A name with a slash is chosen by few."""
    names = ["loss", "reward_std", "frac_reward_zero_std", name]
    assert bool(writers(names)) == is_told


def test_parts_of_a_reward_name_no_trainer_that_has_fewer_of_the_names_than_others():
    names = ["reward/mean", "reward/f", "reward/g", "reward/g_minus_f", "optim/lr", "time/total", "policy/entropy"]
    assert "skyrl" not in writers(names)
    assert trainer_from_metric_names(names) is None
