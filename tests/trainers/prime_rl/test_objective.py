"""prime-rl: options by release, what is refused by name, and what its orchestrator leaves out."""

import pytest
import torch

from rolloutdoctor.engine.configure import read_trainer_config
from rolloutdoctor.evaluation.rows import evaluate_rows
from rolloutdoctor.objective.objective import LengthTerm, RowSet
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.prime_rl.trainer import OPTIONS, objective
from rolloutdoctor.trainers.releases import parse_version


def made(version="0.8.1", **options):
    named = {name.replace("__", "."): value for name, value in options.items()}
    return objective(resolve(OPTIONS, parse_version(version), [Layer("test", named)], trainer="prime-rl"))


@pytest.mark.parametrize(
    ("version", "options", "why"),
    [
        ("0.8.1", {"algo__type": "echo"}, "terms of another component of the loss"),
        ("0.8.1", {"algo__type": "rae"}, "its baseline is a history of earlier steps; set stored_advantages = true"),
        ("0.8.1", {"algo__type": "hierarchical_grpo"}, "the rows do not name agents"),
        ("0.8.1", {"algo__length_penalty__type": "square"}, "expected one of linear or null"),
        ("0.5.0", {"algo__length_penalty__num_turns_weight": 0.1}, "the option came with 0.7"),
        ("0.8.1", {"loss__ratio_type": "sequence"}, "the option is gone since 0.5"),
        ("0.5.0", {"loss__type": "ipo"}, "it came with 0.6, and the run is of 0.5.0"),
        ("0.6.0", {"advantage__length_shaping_alpha": 0.1}, "the option is gone since 0.6"),
        ("0.5.0", {"advantage__length_weighted_mean": True}, "the option is gone since 0.5"),
        ("0.6.0", {"advantage__type": "custom"}, "a custom function is not part of the run file"),
        ("0.4.0", {"loss__dppo_mask_low": 0.1}, "the option came with 0.6"),
        (
            "0.8.1",
            {"train__source": [{"name": "chess", "algo": {"type": "max_rl"}}]},
            r"the environment chess has its own algorithm \(max_rl\)",
        ),
        (
            "0.8.1",
            {"train__source": [{"algo": {"type": "grpo", "length_penalty": {"num_turns_weight": 0.1}}}]},
            "has its own algorithm",
        ),
    ],
)
def test_what_is_refused(version, options, why):
    with pytest.raises(UsageError, match=why):
        made(version, **options)


@pytest.mark.parametrize("algorithm", ["rae", "hierarchical_grpo"])
def test_stored_advantages_stand_for_rules_that_need_more(algorithm):
    assert made(algo__type=algorithm, stored_advantages=True).advantage.estimator == "as_stored"


@pytest.mark.parametrize(
    ("version", "options", "term"),
    [
        ("0.5.0", {"advantage__length_shaping_alpha": 0.5}, LengthTerm(rescaling=0.5)),
        ("0.6.0", {"advantage__length_penalty__coef": 0.5}, LengthTerm(output=0.5, span=2048)),
        (
            "0.6.0",
            {"advantage__length_penalty__gate_by_correctness": True, "orchestrator__seq_len": 64},
            LengthTerm(output=0.25, span=64, gated=True),
        ),
        ("0.7.0", {"algo__length_penalty__type": "linear"}, LengthTerm(output=0.25, input=0.1, turns=0.1)),
        ("0.8.1", {"algo__length_penalty__num_turns_weight": 0.7}, LengthTerm(output=0.25, input=0.1, turns=0.7)),
        ("0.8.1", {"algo__length_penalty__type": "linear", "algo__type": "max_rl"}, None),
        ("0.8.1", {}, None),
    ],
)
def test_a_penalty_is_there_where_any_of_its_options_is(version, options, term):
    assert made(version, **options).advantage.length_term == term


def test_only_a_penalty_on_input_tokens_asks_for_prompts():
    weights = {"num_output_tokens_weight": 0.3, "num_input_tokens_weight": 0.0}
    without = made(**{f"algo__length_penalty__{name}": value for name, value in weights.items()})
    assert "prompt_ids" not in advantage_columns(without)
    assert "prompt_ids" in advantage_columns(made(algo__length_penalty__type="linear"))


@pytest.mark.parametrize(("version", "wanted"), [("0.5.0", [2 / 3, -1 / 3, -1 / 3]), ("0.6.0", [0.5, -0.5, 0.0])])
def test_a_failed_rollout_counts_in_the_baseline_before_0_6(version, wanted):
    batch = toy_batch([[1, 0, 0]], mask=[[1, 1], [1], [0, 0]])
    found = evaluate_rows(batch, made(version), torch.float64)
    assert found.advantage_N.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("version", "options", "filtered"),
    [
        ("0.5.0", {}, False),
        ("0.6.0", {}, True),
        ("0.8.0", {"post_batch_filters": [{"type": "gibberish"}]}, False),
        ("0.8.0", {"post_batch_filters": [{"type": "zero_advantage", "enforce": False}]}, False),
        ("0.8.0", {"post_batch_filters": [{"type": "zero_advantage"}]}, True),
        ("0.8.1", {}, True),
        ("0.8.1", {"filter_zero_advantages": False}, False),
    ],
)
def test_rows_without_an_advantage_leave_everything(version, options, filtered):
    mine = made(version, **options)
    for scope in (mine.policy, mine.kl, mine.denominator, mine.metric):
        assert (RowSet.ZERO_ADVANTAGE in scope.without) == filtered


def test_the_trainers_own_toml(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text("[trainer.loss]\ntype = 'ipo'\nipo_threshold = 0.3\n[orchestrator]\ngroup_size = 8\n")
    layer = read_trainer_config(str(path))
    mine = objective(resolve(OPTIONS, (0, 8, 1), [layer], trainer="prime-rl"))
    assert (mine.surrogate.kind, mine.surrogate.clip_low) == ("probability_band", 0.3)
    path.write_text("[trainer")
    with pytest.raises(UsageError, match="not TOML"):
        read_trainer_config(str(path))
