"""miles: a step as its own functions log it gives no warning, and what is not computed is refused by name."""

from dataclasses import replace

import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.table import trainer_from_metric_names

ESTIMATOR = {"advantage_estimator": "grpo"}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["grpo", "gspo", "ppo, k2", "reinforce++, KL", "KL low_var_kl", "tis", "one pass"])
@pytest.mark.parametrize("case", ["ragged", "two_steps", "segments"])
def test_a_healthy_step_gives_no_warning(case, config):
    result = results("miles")[case, config]
    logged = dict(result.scalars["f32"])
    logged.pop("loss")
    batch = batch_of("miles", case, torch.float32)
    batch = replace(batch, per_token={**batch.per_token, "advantages": torch.tensor(result.advantage["f32"])})
    found = diagnose([batch], trainer="miles", options=ESTIMATOR | result.options, logged=[logged])
    told = [one for one in found.findings if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA003"], told
    assert not [one for one in told if one.severity.label == "error"], told


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"advantage_estimator": "cispo"}, "expected one of grpo, gspo"),
        ({"use_opd": True}, "teacher's log-probs"),
        ({"custom_reward_post_process_path": "mine.py:f"}, "a custom function"),
        ({"multi_lora": True}, "each adapter"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "miles allows only one of them"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "miles requires it too"),
        ({"skip_actor_forward_only": True, "kl_coef": 0.1, "advantage_estimator": "ppo"}, "miles refuses it"),
        ({"skip_actor_forward_only": True, "use_opsm": True}, "not computed by this version"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("miles", **ESTIMATOR | options)


def test_its_log_is_told_from_slimes():
    own = ["train/loss", "train/grad_norm", "train/kl_loss", "train/ess_ratio"]
    assert trainer_from_metric_names(own).name == "miles"
    assert trainer_from_metric_names(own[:3]).name == "slime"
