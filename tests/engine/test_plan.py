import pytest

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.plan import available, make_plan, remedy
from rolloutdoctor.engine.prepare import context_for
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.objective.required_columns import LAYOUT_COLUMNS
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.trl import names as trl

EVERYTHING = frozenset(column.name for column in COLUMNS)
LAYOUT = frozenset(LAYOUT_COLUMNS)
KL_METRICS = frozenset({"kl", "actor/kl_loss", "rollout/kl"})


def plan_for(*codes, trainer="trl@1.16.0", columns=EVERYTHING, metrics=KL_METRICS, **options):
    if trainer == "verl":
        options = {"adv_estimator": "grpo", **options}
    configured = configure(RunMetadata(), trainer, [Layer("test", options)] if trainer else [])
    rules = [find(code) for code in codes] or RULES
    return make_plan(rules, context_for(frozenset(columns), metrics, configured))


def codes_of(rules):
    return [rule.code for rule in rules]


# Which columns are read.

ADVANTAGES = {"advantage", "advantages", "response_mask"}
TRL_LOSS = {"reward", "group_id", "response_mask", "policy_log_probs", "old_log_probs"}


@pytest.mark.parametrize(
    ("code", "options", "columns"),
    [
        ("RDA003", {}, {"reward", "group_id"} | ADVANTAGES),
        ("RDA002", {}, {"reward", "group_id"} | ADVANTAGES),
        ("RDA001", {}, TRL_LOSS | ADVANTAGES | {"response_mask_pre"}),
        ("RDA001", {"beta": 0.1}, TRL_LOSS | ADVANTAGES | {"response_mask_pre", "ref_log_probs"}),
        ("RDG001", {"beta": 0.1}, TRL_LOSS | ADVANTAGES | {"ref_log_probs", "sum_pi_squared"}),
        ("RDG002", {}, TRL_LOSS),
        ("RDM001", {"beta": 0.1}, TRL_LOSS | {"ref_log_probs", "kl"}),
        ("RDM002", {}, {"group_id", "response_mask", "reward"}),
        # the configuration rules these out, so nothing is read for them
        ("RDG001", {}, set()),
        ("RDM001", {}, set()),
        ("RDA003", {"scale_rewards": "none"}, set()),
    ],
)
def test_only_what_is_needed_is_read(code, options, columns):
    assert plan_for(code, **options).columns - LAYOUT == columns


@pytest.mark.parametrize(
    ("trainer", "options", "more", "less"),
    [
        ("verl", {}, set(), {"ref_log_probs", "values", "response_mask_pre"}),
        ("verl", {"use_kl_loss": True}, {"ref_log_probs"}, {"values"}),
        ("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": 2}, {"response_mask_pre"}, {"values"}),
        ("slime", {"advantage_estimator": "ppo"}, {"values"}, {"ref_log_probs", "group_id"}),
        ("slime", {"advantage_estimator": "ppo", "kl_coef": 0.1}, {"values", "ref_log_probs"}, {"group_id"}),
        ("slime", {"use_rollout_logprobs": True}, {"rollout_log_probs"}, {"values"}),
        ("trl", {"loss_type": "bnpo", "gradient_accumulation_steps": 2}, {"micro_batch_id"}, {"values"}),
    ],
)
def test_columns_follow_the_configuration(trainer, options, more, less):
    found = plan_for("RDG002", trainer=trainer, **options).columns
    assert found >= more
    assert not found & less


def test_text_is_not_read_where_there_are_token_ids():
    for trainer in ("trl", "verl", "slime"):
        found = plan_for(trainer=trainer, columns=EVERYTHING - {"ground_truth"}).columns
        assert not found & {"prompt", "response", "returns"}
    # The answer that a response states is compared with the reference answer.
    assert "response" in plan_for().columns


def test_only_columns_that_are_there_are_read():
    columns = {"reward", "group_id", "response_mask", "policy_log_probs"}
    plan = plan_for(columns=columns)
    assert plan.columns == columns


def test_nothing_is_read_for_a_rule_that_cannot_run():
    columns = EVERYTHING - {"ref_log_probs"}
    plan = plan_for("RDG001", beta=0.1, columns=columns)
    assert codes_of(plan.rules) == []
    assert plan.columns <= LAYOUT


# Which rules run.


def test_everything_is_there():
    plan = plan_for(beta=0.1, metrics=KL_METRICS | {one.pattern for one in trl.NAMES})
    ruled_out = [one.code for one in plan.not_applicable]
    # TRL has no such fault.
    faults = [find(name).code for name in ("RDA026", "reward-at-mask", "RDG016")]
    with_rows = ["RDA020", "RDA024", "RDG004", "RDG012", "RDO007", "RDO012", "RDO015", "RDT001", "RDT018", "RDT019"]
    assert ruled_out == sorted([*faults, *with_rows, "RDT022"])
    assert plan.rules == tuple(rule for rule in RULES if rule.code not in ruled_out)
    assert plan.skipped == ()
    assert [fix.label for fix in plan.fixes] == [
        "rejected-rows:singleton-raw",
        "one-vote-per-rollout:shared",
        "zero-std:loss",
    ]


def test_fixes_that_are_not_about_the_configuration_are_not_evaluated():
    of_baselines = ["rejected-rows:singleton-raw", "one-vote-per-rollout:shared"]
    assert [fix.label for fix in plan_for().fixes] == of_baselines
    # Rows without a trajectory have one vote each.
    assert [fix.label for fix in plan_for(columns=EVERYTHING - {"trajectory_id"}).fixes] == of_baselines[:1]
    assert plan_for("RDG002", beta=0.1).fixes == ()
    ppo = plan_for(trainer="slime", advantage_estimator="ppo")
    assert [fix.label for fix in ppo.fixes] == ["kl-inplace:copy"]


def test_no_trainer():
    plan = plan_for(trainer=None)
    assert {"RDI001", "RDI002", "RDM002"} <= set(codes_of(plan.rules))
    assert not any(rule.needs_objective for rule in plan.rules)
    assert len(plan.skipped) + len(plan.rules) + len(plan.not_applicable) == len(RULES)
    for skipped in plan.skipped:
        rule = find(skipped.code)
        if not rule.needs_rows and not rule.needs_objective and rule.code != "RDG002":  # it reads rows if there are any
            assert "log" in skipped.reason or "no known metric" in skipped.reason
            continue
        assert skipped.reason == "nothing says which trainer made the run, and with which options"
        assert skipped.remedy.startswith("name it with --trainer NAME")
    assert plan.fixes == ()


def test_several_missing_columns():
    (skipped,) = plan_for("RDG001", beta=0.1, columns={"reward", "group_id"}).skipped
    assert (skipped.code, skipped.name) == ("RDG001", "zero-std-kl")
    assert skipped.reason == "missing columns old_log_probs, policy_log_probs, ref_log_probs, response_mask"
    # the recorder is named once, and what the reference needs beyond it
    assert skipped.remedy.count("record(trainer") == 1
    assert skipped.remedy.endswith("with beta > 0 so that TRL has a reference model")


@pytest.mark.parametrize(
    ("trainer", "options", "column", "words"),
    [
        ("verl", {"use_kl_loss": True}, "ref_log_probs", "actor_rollout_ref.actor.use_kl_loss=true"),
        ("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": 2}, "response_mask_pre", "`response_mask` before"),
        ("slime", {"advantage_estimator": "ppo"}, "values", "--dump-details DIR with advantage_estimator ppo"),
        ("slime", {}, "response_mask", "run slime with --dump-details DIR"),
    ],
)
def test_remedies_name_the_option_that_records_the_column(trainer, options, column, words):
    (skipped,) = plan_for("RDG002", trainer=trainer, columns=EVERYTHING - {column}, **options).skipped
    assert skipped.reason == f"missing column {column}"
    import re

    assert re.search(words, skipped.remedy)


def test_remedy_without_a_trainer():
    context = plan_for(trainer=None).context
    assert remedy(["kl"], context) == "record these columns, or name them as `rolloutdoctor info` lists them"


def test_stand_ins():
    assert available("old_log_probs", frozenset({"policy_log_probs"}))
    assert available("policy_log_probs", frozenset({"old_log_probs"}))
    assert not available("ref_log_probs", frozenset({"policy_log_probs"}))
    assert not available("policy_log_probs", frozenset({"rollout_log_probs"}))
    plan = plan_for("RDG002", columns=EVERYTHING - {"policy_log_probs"})
    assert codes_of(plan.rules) == ["RDG002"]
    assert "old_log_probs" in plan.columns


def test_metrics_that_are_missing():
    (skipped,) = plan_for("RDM001", beta=0.1, columns=EVERYTHING - {"kl"}, metrics=frozenset({"loss"})).skipped
    assert skipped.reason == "no logged KL: neither a column kl nor the metric kl"
