"""`identify` finds the configuration that made a run, says what excludes the others, and what is indistinguishable."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search.made import objective_of, run_of

from rolloutdoctor.commands.identify.query import identify
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.objective.objective import RowSet

CONFIGURATIONS = [
    *[("trl", {"scale_rewards": scale, "beta": 0.04}) for scale in ("group", "batch", "none")],
    *[("trl", {"loss_type": kind, "beta": 0.01}) for kind in ("grpo", "bnpo", "dr_grpo")],
    ("trl", {"use_bias_correction_kl": False, "beta": 0.2, "importance_sampling_level": "sequence"}),
    ("trl", {"beta": 0.0}),
    ("trl-rloo", {"beta": 0.0}),
    ("trl-rloo", {"beta": 0.05}),
    ("trl-rloo", {"beta": 0.0, "normalize_advantages": True}),
    *[("verl", {"algorithm.adv_estimator": name}) for name in ("grpo", "rloo", "opo", "gpg", "rloo_vectorized")],
    ("verl", {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}),
    ("verl", {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}),
    (
        "verl",
        {
            "algorithm.adv_estimator": "rloo",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "k3",
            "algorithm.kl_ctrl.kl_coef": 0.03,
        },
    ),
    *[
        (
            "verl",
            {
                "algorithm.adv_estimator": "grpo",
                "actor_rollout_ref.actor.use_kl_loss": True,
                "actor_rollout_ref.actor.kl_loss_type": kl,
                "actor_rollout_ref.actor.loss_agg_mode": mode,
            },
        )
        for kl, mode in (("k1", "seq-mean-token-sum"), ("low_var_kl", "token-mean"), ("k2", "seq-mean-token-mean"))
    ],
    ("slime", {"advantage_estimator": "grpo"}),
    ("slime", {"advantage_estimator": "grpo", "grpo_std_normalization": False}),
    ("slime", {"advantage_estimator": "grpo", "normalize_advantages": True}),
    ("slime", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k2", "calculate_per_token_loss": True}),
]


def found(trainer, objective, **options):
    return identify(run_of(trainer, objective, **options), ReadOptions())


def holds(stage, trainer, options):
    """Whether some class of a stage has a configuration that says nothing else of these options."""
    members = [one for each in stage.classes for one in (each, *each.equivalent)]
    return any(
        one.trainer == trainer
        and all(
            one.options.get(name, value) == pytest.approx(value)
            if isinstance(value, float)
            else one.options.get(name, value) == value
            for name, value in options.items()
        )
        for one in members
    )


def check_found(trainer, options, seed):
    result = found(trainer, objective_of(trainer, options), seed=seed)
    for stage in result.stages:
        if stage.outcome != "untestable":
            assert stage.outcome in ("one", "several"), (stage.stage, stage)
            assert all(each.matched == stage.compared for each in stage.classes)
            assert holds(stage, trainer, options), (stage.stage, stage.classes)
    assert result.stages[0].outcome != "untestable"
    assert result.stages[2].outcome != "untestable"
    assert result.recorded == "absent"
    return result


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("trainer", "options"), CONFIGURATIONS, ids=lambda value: str(value)[:60])
def test_the_true_configuration_is_found(trainer, options):
    check_found(trainer, options, seed=3)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(choice=st.sampled_from(CONFIGURATIONS), seed=st.integers(0, 10_000))
def test_the_true_configuration_is_found_on_any_rows(choice, seed):
    check_found(*choice, seed=seed)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"biased_std": True}, "std with ddof 0"),
        ({"epsilon": 1e-4, "epsilon_in_root": True}, "sqrt(std^2 + 0.0001)"),
        ({"biased_std": True, "scale": "batch", "epsilon": 1e-3}, "batch std + 0.001"),
        ({"biased_std": True, "epsilon": 0.01, "epsilon_in_root": True}, "sqrt(std^2 + 0.01), std with ddof 0"),
        ({"epsilon": 0.037}, "std + 0.037"),
    ],
)
def test_a_recipe_of_no_known_trainer_is_found(changes, words):
    base = objective_of("verl", {"algorithm.adv_estimator": "grpo"})
    objective = replace(base, advantage=replace(base.advantage, **changes))
    result = found("verl", objective)
    stage = result.stages[0]
    assert stage.outcome == "one"
    assert stage.classes[0].trainer is None
    assert not any(each.trainer for each in stage.classes[0].equivalent)
    assert words in stage.classes[0].words
    assert result.use == ()


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("weights", [(1.0, 0.2), (0.5, 2.0), (1.0, -0.3)])
def test_weights_of_reward_functions_that_nobody_states(weights):
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": list(weights)}
    result = found("trl", objective_of("trl", options), seed=5, functions=2)
    stage = result.stages[0]
    assert (stage.outcome, stage.classes[0].trainer) == ("one", "trl")
    # Over the deviation of the batch the scale of the weights is lost but for epsilon.
    equal = [stage.classes[0].options, *(one.options for one in stage.classes[0].equivalent)]
    assert any(options["reward_weights"] == pytest.approx(weights) for options in equal)
    (first, second) = equal[0]["reward_weights"]
    assert second / first == pytest.approx(weights[1] / weights[0])


@pytest.mark.slow
def test_rows_that_vote_are_told_apart_by_masked_responses_alone():
    base = objective_of("verl", {"algorithm.adv_estimator": "grpo"})
    objective = replace(base, baseline_rows=base.baseline_rows.leaving_out(RowSet.REJECTED))
    assert "only unmasked rows count in the baseline" in found("verl", objective).stages[0].classes[0].words
    plain = found("verl", base, masked=0.0).stages[0]
    assert "a group with a fully masked response" in plain.separate
    assert any("only unmasked rows count in the baseline" in each.apart for each in plain.classes[0].equivalent)


@pytest.mark.slow
def test_recorded_options_that_the_log_contradicts():
    objective = objective_of("verl", {"algorithm.adv_estimator": "grpo"})
    wrong = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
    result = found("verl", objective, config=wrong)
    assert result.recorded == "contradicts"
    assert "algorithm.norm_adv_by_std_in_grpo=true" in result.use
    right = found("verl", objective, config={"algorithm.adv_estimator": "grpo"})
    assert right.recorded == "agrees"


@pytest.mark.slow
def test_a_coefficient_is_one_number_for_the_run():
    result = found("trl", objective_of("trl", {"beta": 0.04, "loss_type": "grpo"}))
    assert result.stages[2].classes[0].options["beta"] == 0.04


@pytest.mark.slow
def test_without_logged_numbers_nothing_can_be_tested():
    run = run_of("verl", objective_of("verl", {"algorithm.adv_estimator": "grpo"}))
    steps = [replace(step, per_row={"reward": step.per_row["reward"]}) for step in run.batches(())]
    run.batches = lambda wanted, **options: iter(steps)
    run.metrics = run.metrics.by_batch(2, 1, (), lambda name: False)
    result = identify(run, ReadOptions())
    assert result.nothing_identified
    assert [stage.outcome for stage in result.stages] == ["untestable"] * 3
    assert result.stages[0].remedy


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("bad", [1, 2, 3, 4])
def test_a_step_that_was_made_otherwise_is_named(bad):
    objective = objective_of("verl", {"algorithm.adv_estimator": "grpo"})
    run = run_of("verl", objective)
    steps = list(run.batches(()))
    columns = dict(steps[bad - 1].per_row)
    columns["advantage"] = columns["advantage"] * 0.5
    steps[bad - 1] = replace(steps[bad - 1], per_row=columns)
    run.batches = lambda wanted, **options: iter(steps)
    result = identify(run, ReadOptions())
    stage = result.stages[0]
    assert stage.outcome == "partial"
    assert stage.classes[0].options["algorithm.adv_estimator"] == "grpo"
    assert stage.classes[0].where == f"all but step {bad}"
    assert result.stages[2].outcome == "one"
