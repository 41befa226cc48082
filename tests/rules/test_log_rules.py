"""Rules on logged numbers hold for every trainer that logs what they need: each says a verdict or a true reason."""

import pytest

import rolloutdoctor as rd
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import TRAINERS
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES

LEVELS = {
    "zero_variance_share": 0.2,
    "entropy": 1.0,
    "kl": 0.02,
    "kl_coefficient": 0.01,
    "loss": 0.0102,
    "policy_loss": 0.01,
    "kl_term": 0.0002,
    "clip_fraction": 0.02,
    "truncated_share": 0.05,
    "response_length": 100.0,
    "response_length_min": 20.0,
    "response_length_max": 300.0,
    "learning_rate": 1e-6,
    "sampler_pearson": 0.999,
    "sampler_ppl": 2.0,
    "trainer_ppl": 2.0,
    "is_weight": 1.0,
    "sampler_ess": 0.99,
    "ratio": 1.0,
    "ratio_max": 1.1,
    "ratio_min": 0.9,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "advantage_min": -1.0,
    "advantage_max": 1.0,
    "tokens": 1000.0,
    "tokens_seen": 1000.0,
    "samples": 64.0,
    "step_time": 10.0,
}
"""Healthy levels; whatever is not named is a hundredth."""

STEADY = ("learning_rate", "truncated_share", "sampler_pearson", "sampler_ess")

ON_LOGS = [rule for rule in RULES if not rule.needs_rows]


def healthy(trainer, steps=60):
    """Log every name of the newest release of a trainer, with a little noise."""
    named = {}
    for metric in TRAINERS[trainer]:
        if not metric.until:
            name = "".join(metric.spellings[0]).replace("*", "first")
            level = LEVELS.get(metric.quantity, 0.01)
            named[name] = ((level - metric.offset) / metric.factor, metric.quantity)
    lines = {}
    for step in range(1, steps + 1):
        # Of the length another one: a reward that goes with it is a finding.
        wobbles = [1 + 0.02 * ((step * pace) % 11 - 5) / 5 for pace in (7, 3)]
        lines[StepKey(step, TRAIN)] = {
            name: 0.0
            if quantity == "kl" and step == 1
            else value * (1 if quantity in STEADY else wobbles[quantity == "response_length"])
            for name, (value, quantity) in named.items()
        }
    return Run([], RunMetadata(), LoggedMetrics(lines))


def needed(rule):
    """Quantities of which a rule needs all; those of rules that choose are in the reason that they give."""
    return set(rule.about) if isinstance(rule, NumbersRule) else set()


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_rule_on_logs_tests_what_a_trainer_logs_or_says_what_it_does_not(trainer):
    logs = {metric.quantity for metric in TRAINERS[trainer] if not metric.until}
    report = check(healthy(trainer), CheckOptions(rules=tuple(ON_LOGS), device="cpu"))
    titles = {BY_NAME[name].title: name for name in BY_NAME}
    for skipped in report.skipped:
        reason = skipped.reason.removeprefix("the log has no metric for the ")
        absent = [titles[title] for title in reason.split(" and the ") if title in titles]
        # Few names belong to several trainers, and then to none for certain.
        if absent:
            assert any(name not in logs for name in absent) or trainer == "llama-factory", (skipped.code, reason)
        else:
            assert skipped.code in OTHER_REASONS, (skipped.code, skipped.reason)
    tested = {finding.code for finding in report.findings} | {code for code, _ in report.clean}
    for rule in ON_LOGS:
        about = needed(rule)
        if about and about <= logs and rule.code not in OTHER_REASONS and trainer != "llama-factory":
            assert rule.code in tested or rule.code in {one.code for one in report.not_applicable}, rule.code
    assert not [finding for finding in report.findings if finding.severity.label != "info"]


OTHER_REASONS = {
    "RDO012": "the log has no metric for the train-inference mismatch",
    "RDO015": "options that say how many updates a batch has",
    "RDM008": "no identity connects the metrics",
    "RDG004": "nothing gives the coefficient of the KL in the loss",
    "RDI012": "the sentence names rows, too",
    "RDI014": "options, of which none are stated",
    "RDA024": "advantages that are neither the rewards nor around 0",
    "RDG003": "a share that does not count every such group proves nothing below 1",
}
"""Rules whose reason is another than a quantity that is not logged."""


def test_names_that_are_shared_are_known(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "train/loss": 0.13, "train/grad_norm": NaN, "own/number": 3.0}\n')
    (found,) = [one for one in rd.check(path).findings if one.code == "RDM003"]
    assert found.headline == "train/grad_norm is NaN in step 1, the only logged step"
