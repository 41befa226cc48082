"""ms-swift: a step as its own functions log it, what is reported of it, and what is refused."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.formulas.losses.future_kl import future_kl, influence
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import diagnose, toy_batch
from rolloutdoctor.trainers.table import TRAINERS

TINY = {"num_generations": 4, "max_completion_length": 9}


@cache
def report(case, config, *, trainer="ms-swift@4.6.0", release="", **options):
    """The report on a step of the stored results, with the metrics and advantages that the real functions gave."""
    result = (results("ms_swift") | (results("ms_swift", release) if release else {}))[case, config]
    batch = batch_of("ms_swift", case, torch.float32)
    batch.per_row["advantage"] = torch.tensor(result.advantage["f32"], dtype=torch.float64)
    made = {**TINY, **result.options, **options}
    return diagnose([batch], trainer=trainer, options=made, logged=[result.scalars["f32"]])


@pytest.mark.slow
@pytest.mark.parametrize("config", ["grpo", "bnpo", "sapo", "sequence, grpo", "rloo", "token_truncate, grpo"])
def test_a_healthy_step_gives_no_warning(config):
    found = report("two_steps", config, gradient_accumulation_steps=4)
    told = [one for one in found.findings if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA003"], told
    assert not [one for one in found.findings if one.severity.label == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["dapo", "cispo", "sequence, dapo"])
def test_dapo_and_cispo_are_divided_by_their_micro_batches(config):
    found = report("two_steps", config, trainer="ms-swift@4.5.3", gradient_accumulation_steps=4)
    (one,) = [one for one in found.findings if one.code == "RDG006"]
    assert (one.severity.label, one.verdict) == ("warning", "confirmed")
    assert one.measures["divided_by"].value == 4


@pytest.mark.slow
def test_one_micro_batch_is_divided_once():
    assert "RDG006" not in {one.code for one in report("ragged", "dapo", trainer="ms-swift@4.5.3").findings}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["dapo", "cispo", "sequence, dapo"])
def test_newer_releases_divide_once(config):
    found = report("two_steps", config, release="4.6.0", gradient_accumulation_steps=4)
    assert not {"RDG005", "RDG006"} & {one.code for one in found.findings}
    assert "RDG005" in {code for code, *_ in found.clean}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", ["ms-swift", "ms-swift@4.6.0.dev0"])
@pytest.mark.parametrize("release", ["", "4.6.0"])
def test_an_unknown_release_is_no_fault_of_the_loss(trainer, release):
    found = report("two_steps", "dapo", trainer=trainer, release=release, gradient_accumulation_steps=4)
    told = {one.code: one for one in found.findings}
    assert "RDG005" not in told
    if release:
        assert "RDG006" not in told
        assert "RDG005" in {code for code, *_ in found.clean}  # the loss agrees, which no accident does
    else:
        assert told["RDG006"].severity.label == "warning"
        assert "ms-swift before 4.6.0" in told["RDG006"].message
        assert "4.6.0" in {one.code: one.reason for one in found.skipped}["RDG005"]
    known = report("two_steps", "dapo", trainer="ms-swift@4.6.0", gradient_accumulation_steps=4)
    assert {one.code: one.severity.label for one in known.findings}["RDG006"] == "error"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length"),
        ({"teacher_model": "some/model"}, "teacher_model"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("ms-swift", **options)


STORED = json.loads((Path(__file__).parents[2] / "goldens/data/swift_rewards.json").read_text())


def logged(version, batches):
    """What is logged of each reward function, of one generation batch or of several."""
    parts = torch.arange(len(batches)).repeat_interleave(4)
    columns = torch.tensor([row for each in batches for row in each], dtype=torch.float64)
    batch = toy_batch([[1, 0]] * (2 * len(batches)), per_row={"generation_id": parts.tolist()})
    batch = replace(batch, rewards=dict(zip(STORED["names"], columns.T, strict=True)))
    found = dict(TRAINERS["ms-swift"].metrics(evaluate(batch, objective_of(f"ms-swift@{version}"))))
    return {name: value for name, value in found.items() if name.startswith("rewards/")}


@pytest.mark.parametrize("version", STORED["results"])
def test_what_is_logged_of_a_reward_function_that_did_not_score_every_row(version):
    """Without any reward the mean was not a number, and is left out from 4.6.0 on; of one there was no deviation."""
    each = STORED["results"][version]
    for batch, wanted in zip(STORED["batches"], each, strict=True):
        assert logged(version, [batch]) == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    # As the trainer logs them: the mean over the generation batches that have the name.
    wanted = {}
    for name in {*each[0], *each[1]}:
        values = [one[name] for one in each if name in one]
        wanted[name] = sum(values) / len(values)
    found = logged(version, STORED["batches"])
    assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert ("rewards/none/mean" in found) == (version < "4.6")
    assert math.isnan(found["rewards/late/mean"]) == (version < "4.6")


@pytest.mark.parametrize(
    ("mask", "policy", "wanted"),
    [
        ([1, 1, 1], [0.1, 0.2, 0.4], [0.1 + 0.1 + 0.1, 0.2 + 0.2, 0.4]),
        # A masked token passes time, and adds nothing.
        ([1, 0, 1], [0.1, 9.0, 0.4], [0.1 + 0.1, 0.4]),
    ],
)
def test_future_kl_halves_every_decay_rate(mask, policy, wanted):
    trained = torch.tensor(mask) != 0
    given = TokenInputs.of(torch.tensor(policy, dtype=torch.float64)[trained], torch.ones(int(trained.sum())))
    gate = TermWeight(kind="future_kl", decay=0.5)
    rule = objective_of("ms-swift", loss_type="fipo").surrogate
    found = future_kl(given, trained, torch.tensor([0, 3]), gate, rule)
    assert found.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(("advantage", "threshold", "wanted"), [(-1, 1.49, 1.0), (-1, 1.51, 1.2), (1, 1.49, 1.2)])
def test_only_a_large_ratio_of_a_negative_advantage_is_held_below_1(advantage, threshold, wanted):
    mask = torch.tensor([True])
    given = TokenInputs.of(torch.tensor([1.5], dtype=torch.float64).log(), torch.tensor([float(advantage)]))
    mine = objective_of("ms-swift", loss_type="fipo", fipo_safety_threshold=threshold)
    found = influence(given, mask, torch.tensor([0, 1]), mine.gates[0], mine.surrogate)
    assert found.tolist() == pytest.approx([wanted])


@pytest.mark.parametrize("rate", [0, -1])
def test_a_decay_rate_that_upstream_divides_by_is_above_0(rate):
    with pytest.raises(UsageError, match=r"fipo_decay_rate = .*: a number of tokens above 0 is expected"):
        objective_of("ms-swift", loss_type="fipo", fipo_decay_rate=rate)
