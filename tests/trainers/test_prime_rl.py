"""prime-rl: options by release, what is refused by name, and what its orchestrator leaves out."""

import pytest

from rolloutdoctor.engine.configure import read_trainer_config
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.results.errors import UsageError
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
        ("0.8.1", {"algo__length_penalty__num_turns_weight": 0.1}, "what it reads is not in the rows"),
        ("0.8.1", {"loss__ratio_type": "sequence"}, "the option is gone since 0.5"),
        ("0.5.0", {"loss__type": "ipo"}, "it came with 0.6, and the run is of 0.5.0"),
        ("0.5.0", {"advantage__length_shaping_alpha": 0.1}, "what it reads is not in the rows"),
        ("0.4.0", {"advantage__length_weighted_mean": True}, "what it reads is not in the rows"),
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
