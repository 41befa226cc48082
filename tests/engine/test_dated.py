"""The release of a run that nothing states, by the names in its log; and what older releases of TRL do otherwise."""

from dataclasses import replace

import pytest
import torch

from rolloutdoctor.data.batch import TRAIN, StepKey
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.identified_options import with_identified
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.table import releases_of
from rolloutdoctor.testing import diagnose, toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

OLD = ("loss", "grad_norm", "reward", "completion_length", "kl")


def version_of(names, trainer="trl", metadata=None):
    logged = LoggedMetrics({StepKey(1, TRAIN): dict.fromkeys(names, 0.5)})
    run = Run([], metadata or RunMetadata(), logged)
    run, options = with_identified(run, CheckOptions(trainer=trainer))
    found = configure(run.metadata, options.trainer, options.layers)
    return found.version, found.version_assumed


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (OLD, ("0.16", True)),
        ((*OLD, "num_tokens"), ("0.16", True)),
        (("loss", "reward", "completions/mean_length"), (TRAINERS["trl"].newest, True)),
        # Of no release.
        ((*OLD, "completions/mean_length"), (TRAINERS["trl"].newest, True)),
    ],
)
def test_the_newest_release_that_logs_such_names(names, found):
    assert version_of(names) == found


def test_what_is_stated_goes_first():
    assert version_of(OLD, "trl@1.2") == ("1.2", False)
    assert version_of(OLD, None, RunMetadata("trl", "0.15.2")) == ("0.15.2", False)


def test_ranges():
    assert releases_of(["completion_length"], "trl") == ("", "0.17")
    assert releases_of(["entropy", "nobody/knows"], "trl") == ("0.20", "")
    assert releases_of(["completion_length", "entropy"], "trl") is None


def test_a_row_without_a_score_has_a_reward_of_0_before_1_6():
    """The finding says so, with what it changes; later releases leave it out."""
    batch = toy_batch([[1, float("nan"), 0.5]], per_row={"advantage": [0.5, -0.5, 0.0]})
    options = {"scale_rewards": "none", "beta": 0.0}
    (found,) = diagnose([batch], trainer="trl@1.5.1", options=options, select=("RDA005",)).findings
    assert found.verdict == "confirmed"
    assert found.measures["rows"].value == 1
    later = replace(batch, per_row={**batch.per_row, "advantage": torch.tensor([0.25, 0.0, -0.25])})
    assert not diagnose([later], trainer="trl@1.6.0", options=options, select=("RDA005",)).findings


def test_the_words_of_scale_rewards_in_0_22_0():
    batch = toy_batch([[1, 0, 0, 0]])
    scales = {}
    for version in ("0.22.0", "0.22.2"):
        for word in ("group", "batch", "none"):
            config = resolve(
                TRAINERS["trl"].options,
                parse_version(version),
                [Layer("test", {"scale_rewards": word})],
                trainer="trl",
            )
            scales[version, word] = float(evaluate(batch, TRAINERS["trl"].objective(config)).rows.advantage_N[0])
    assert scales["0.22.0", "group"] == scales["0.22.2", "none"] == 0.75
    assert scales["0.22.0", "batch"] == scales["0.22.0", "none"] == scales["0.22.2", "group"]


VERL = TRAINERS["verl"].roles


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (tuple(VERL.came_after), ("0.9.1", True)),
        (tuple(VERL.came_after)[1:], ("0.8.0", True)),
        (tuple(VERL.came_after)[2:], ("0.7.1", True)),
        # Of 0.6.0, whose spelling of the correction no later release has.
        (tuple(VERL.came_after)[4:], ("0.6.0", True)),
        (tuple(VERL.came_after)[5:], ("0.5.0", True)),
        ((), ("0.3.0", True)),
    ],
)
def test_a_whole_configuration_of_verl_dates_itself(listed, found):
    names = dict.fromkeys((*VERL.always_listed, *listed), None)
    stated = {name: default_of(name) for name in names}
    metadata = RunMetadata("verl", None, {**stated, "algorithm.adv_estimator": "grpo"})
    assert version_of(("actor/pg_loss",), None, metadata) == found


def default_of(name):
    return next(option.default for option in TRAINERS["verl"].options if option.name == name)


def test_some_options_of_verl_date_nothing():
    metadata = RunMetadata("verl", None, {"algorithm.adv_estimator": "grpo", "algorithm.gamma": 1.0})
    assert version_of(("actor/pg_loss",), None, metadata) == ("0.9.1", True)
