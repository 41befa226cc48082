"""Rewards on their way to the advantages, planted into runs: each fault is named, and no look-alike is."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.cause_search import applicable
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.search.hypotheses.table import FAMILIES, HYPOTHESES
from rolloutdoctor.testing import diagnose, random_batch
from rolloutdoctor.trainers.options import Layer

AUDITED = [rule.code for rule in RULES if isinstance(rule, AuditedRule)]
OPTIONS = {
    "trl": {"beta": 0.0, "num_generations": 8},
    "verl": {"adv_estimator": "grpo", "trainer.use_v1": False},
    "verl v1": {"adv_estimator": "grpo", "trainer.use_v1": True},
    "verl rf++": {"adv_estimator": "reinforce_plus_plus", "gamma": 0.97},
    "verl gae": {"adv_estimator": "gae"},
    "slime": {},
    "slime rf++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.97},
}


@cache
def configured(name):
    return configure(RunMetadata(), name.split(maxsplit=1)[0], [Layer("test", OPTIONS[name])])


def steps_of(count=3, *, holes=0.3, reward=None, **columns):
    """Steps of four groups of eight rows; `reward` gives the rewards of a step."""
    for step in range(count):
        batch = random_batch(step, sizes=(8,) * 4, longest=12, rejected=0.0, empty=0.0, holes=holes, adjacent=True)
        # Every row has a trained token.
        mask_T = batch.per_token["response_mask"].clone()
        mask_T[batch.rows[:-1]] = True
        tokens = {**batch.per_token, "response_mask": mask_T, "response_mask_pre": mask_T}
        draw = torch.Generator().manual_seed(step)
        per_row = {**batch.per_row, **({} if reward is None else {"reward": reward(len(batch), draw)})}
        yield replace(batch, step=step, per_token=tokens, per_row={**per_row, **columns})


def run_of(name, batches, *, objective=None, rows=None, stated=()):
    """The report of `check` on a run whose trainer has another objective, or sees other rows, than its options say.

    Args:
        name: of `OPTIONS`.
        batches: what the file holds.
        objective: edit of what is computed.
        rows: edit of the rows that are computed with.
        stated: fixes that the run states to have.
    """
    made = configured(name)
    base, kind_of = made.objective, made.trainer.log.kind_of

    def is_raw(key):
        return kind_of(key) == "rewards"

    for fix in stated:
        base = choose(fix).apply(base)
    used = base if objective is None else objective(base)
    found, logged = [], []
    for batch in batches:
        seen = batch if rows is None else rows(batch)
        evaluation = evaluate(seen, used, dtype=torch.float64)
        own = evaluate(batch, base, dtype=torch.float64)
        values = dict(made.trainer.metrics(evaluation))
        values |= {key: value for key, value in dict(made.trainer.metrics(own)).items() if is_raw(key)}
        logged.append({key: float(torch.tensor(value)) for key, value in values.items() if "score" not in key})
        part = evaluation.rows
        if part.advantage_N is None:
            found.append(replace(batch, per_token={**batch.per_token, "advantages": part.advantage_T.float()}))
        else:
            found.append(replace(batch, per_row={**batch.per_row, "advantage": part.advantage_N.float().double()}))
    return diagnose(
        found,
        trainer=name.split(maxsplit=1)[0],
        options=OPTIONS[name],
        logged=logged,
        select=AUDITED,
        fixes=tuple(stated),
    )


def by_name(name):
    return next(one for one in HYPOTHESES if one.name == name)


def loud(report):
    return [one for one in report.findings if one.severity > Severity.INFO]


def named(report):
    """The one cause of a report: code and name."""
    (finding,) = loud(report)
    assert finding.cause is not None, finding.message
    assert finding.cause.as_found == finding.cause.compared > finding.cause.as_recorded
    return finding.code, finding.cause.hypothesis


def is_clean(report):
    return not loud(report) and all(entry.agrees for entry in report.audit)


def of_fault(report):
    """The codes of a run whose log is reproduced, and whose release computes something that a fix would change."""
    assert all(entry.agrees for entry in report.audit)
    assert [one.cause for one in loud(report)] == [None] * len(loud(report))
    return [one.code for one in loud(report)]


def ending_trained(batches):
    """The same rows, each with a trained last token."""
    for batch in batches:
        mask_T = batch.per_token["response_mask"].index_fill(0, batch.rows[1:] - 1, True)
        yield replace(batch, per_token={**batch.per_token, "response_mask": mask_T, "response_mask_pre": mask_T})


def applies(hypothesis, name):
    return hypothesis in applicable(SimpleNamespace(objective=configured(name).objective))


# A return that ends at the next masked span.


@pytest.mark.slow
def test_a_return_that_is_reset_at_a_mask_is_named():
    edit = by_name("return-reset-at-mask")
    batches = list(ending_trained(steps_of()))
    assert named(run_of("verl rf++", batches, objective=edit.objective)) == ("RDA004", edit.name)


@pytest.mark.slow
def test_a_reset_return_is_named_where_the_release_loses_rewards_too():
    """verl puts a reward on the last token, where it is lost if that is masked."""
    edit = by_name("return-reset-at-mask")
    differing, lost = loud(run_of("verl rf++", steps_of(), objective=edit.objective))
    assert (differing.code, differing.cause.hypothesis) == ("RDA004", edit.name)
    assert (lost.code, lost.cause, lost.verdict) == (choose("masked-end").fix.code, None, "exposed")


def test_returns_without_masked_spans_cannot_be_reset():
    """A mask that ends early is no span within the response: nothing that is trained lies behind it."""
    batches = list(steps_of(holes=0.0))
    for place, batch in enumerate(batches):
        mask_T = batch.per_token["response_mask"].clone()
        mask_T[(batch.rows[1:] - 1)[batch.rows.diff() > 1][::3]] = False
        batches[place] = replace(batch, per_token={**batch.per_token, "response_mask": mask_T})
    edit = by_name("return-reset-at-mask")
    # A reward on a masked end is lost, reset or not.
    assert of_fault(run_of("verl rf++", batches, objective=edit.objective)) == [choose("masked-end").fix.code]


def test_a_return_is_reset_in_discounted_returns_alone():
    edit = by_name("return-reset-at-mask")
    assert applies(edit, "verl rf++")
    assert not any(applies(edit, name) for name in ("verl", "verl gae", "slime", "slime rf++", "trl"))


# A reward on a masked last token.


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["verl", "slime rf++"])
def test_a_reward_that_is_lost_behind_a_mask_is_named(name):
    edit = by_name("terminal-reward-lost")
    assert named(run_of(name, steps_of(), objective=edit.objective)) == ("RDA004", edit.name)


def test_rows_that_end_in_a_trained_token_lose_nothing():
    batches = list(ending_trained(steps_of()))
    assert is_clean(run_of("verl", batches, objective=by_name("terminal-reward-lost").objective))


@pytest.mark.slow
def test_advantages_of_0_elsewhere_are_no_lost_reward():
    """As many rows without an advantage, which do not end in a masked token."""
    batches = list(steps_of())
    report = run_of("verl", batches)
    assert is_clean(report)
    wrong = []
    for batch in batches:
        advantage_N = evaluate(batch, configured("verl").objective).rows.advantage_N.float().double().clone()
        advantage_N[::3] = 0.0
        wrong.append(replace(batch, per_row={**batch.per_row, "advantage": advantage_N}))
    found = diagnose(wrong, trainer="verl", options=OPTIONS["verl"], select=AUDITED)
    assert [one.cause for one in loud(found)] == [None]


def test_a_trained_token_estimator_has_lost_it_anyway():
    edit = by_name("terminal-reward-lost")
    assert applies(edit, "slime rf++")
    assert not applies(edit, "verl gae")
    assert not applies(edit, "verl rf++")


# Rows that could not be scored.


def scored(share, values=(0.0, 0.3, 0.7, 2.0)):
    def reward(count, draw):
        found_N = torch.tensor(values, dtype=torch.float64)[torch.randint(0, len(values), (count,), generator=draw)]
        return torch.where(torch.rand(count, generator=draw) < share, torch.nan, found_N)

    return reward


def filled(value):
    def rows(batch):
        return replace(batch, per_row={**batch.per_row, "reward": batch.per_row["reward"].nan_to_num(value)})

    return rows


@pytest.mark.slow
def test_rows_that_could_not_be_scored_and_count_as_1_are_named():
    report = run_of("trl", steps_of(reward=scored(0.2)), rows=filled(1.0))
    assert named(report) == ("RDA004", "unparsable-rewarded")


@pytest.mark.slow
def test_rows_that_count_as_0_or_not_at_all_are_not_rewarded():
    assert named(run_of("trl", steps_of(reward=scored(0.2)), rows=filled(0.0))) == ("RDA005", "missing-reward-as-zero")
    assert is_clean(run_of("trl", steps_of(reward=scored(0.2))))


def test_where_all_rows_are_scored_none_can_be_unparsable():
    assert by_name("unparsable-rewarded").rows(next(iter(steps_of())), configured("trl").objective) is None


# Rewards of 0 that count as none.


def instead(value):
    def rows(batch):
        reward_N = batch.per_row["reward"]
        return replace(batch, per_row={**batch.per_row, "reward": torch.where(reward_N == 0, value, reward_N)})

    return rows


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("value", [-1.0, 0.4, 5.0])
def test_a_reward_of_0_that_is_replaced_is_named(value):
    report = run_of("verl", steps_of(reward=scored(0.0)), rows=instead(value))
    assert named(report) == ("RDA004", f"zero-replaced-by-{value:g}")


@pytest.mark.slow
def test_a_reward_of_0_that_another_function_replaces_is_named():
    def with_shaped(batch):
        draw = torch.Generator().manual_seed(100 + batch.step)
        shaped_N = torch.randn(len(batch), generator=draw, dtype=torch.float64)
        return replace(batch, rewards={"score": batch.per_row["reward"], "shaped": shaped_N})

    batches = [with_shaped(batch) for batch in steps_of(reward=scored(0.0))]
    report = run_of("verl", batches, rows=lambda batch: instead(batch.rewards["shaped"])(batch))
    assert named(report) == ("RDA004", "zero-replaced-by-shaped")


@pytest.mark.slow
def test_binary_rewards_do_not_tell_a_replaced_zero_from_another_scale():
    report = run_of("trl", steps_of(reward=scored(0.0, (0.0, 1.0))), rows=instead(-1.0))
    assert not [one for one in loud(report) if one.cause is not None and "zero-replaced" in one.cause.hypothesis]


@pytest.mark.slow
def test_another_reward_that_is_replaced_is_no_replaced_zero():
    def rows(batch):
        reward_N = batch.per_row["reward"]
        return replace(batch, per_row={**batch.per_row, "reward": torch.where(reward_N == 0.3, -1.0, reward_N)})

    report = run_of("verl", steps_of(reward=scored(0.0)), rows=rows)
    assert loud(report)
    assert not [one for one in loud(report) if one.cause is not None and "zero-replaced" in one.cause.hypothesis]


def test_an_estimator_without_rewards_has_none_to_replace():
    family = next(one for one in FAMILIES if one.name == "zero-replaced")
    stored = configured("verl").objective
    stored = replace(stored, advantage=replace(stored.advantage, estimator="as_stored"))
    assert family.applies(configured("verl").objective)
    assert not family.applies(stored)
    assert not by_name("unparsable-rewarded").applies(stored)


# Segments of a trajectory.

ONE_VOTE = "one-vote-per-rollout"


def segmented(seed=0, count=3):
    """Steps in which some rows are further segments of the trajectory before them, with its reward."""
    for batch in steps_of(count):
        draw = torch.Generator().manual_seed(batch.step + seed)
        follows_N = (torch.rand(len(batch), generator=draw) < 0.5) & (torch.arange(len(batch)) % 8 > 0)
        trajectory_N = (~follows_N).long().cumsum(0)
        first_N = (~follows_N).nonzero()[:, 0][trajectory_N - 1]
        per_row = {**batch.per_row, "reward": batch.per_row["reward"][first_N], "trajectory_id": trajectory_N}
        yield replace(batch, per_row=per_row)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["slime", "verl"])
def test_segments_that_count_one_by_one_are_named_in_a_run_that_counts_trajectories(name):
    edit = by_name("every-segment-votes")
    report = run_of(name, segmented(), objective=edit.objective, stated=(ONE_VOTE,))
    assert named(report) == ("RDI003", edit.name)


def test_a_run_that_counts_trajectories_as_it_says_is_clean():
    assert is_clean(run_of("slime", segmented(), stated=(ONE_VOTE,)))
    assert is_clean(run_of("verl v1", segmented()))


def test_trajectories_of_one_segment_have_one_vote_anyway():
    batches = [
        replace(batch, per_row={**batch.per_row, "trajectory_id": torch.arange(len(batch))}) for batch in steps_of()
    ]
    edit = by_name("every-segment-votes")
    assert is_clean(run_of("slime", batches, objective=edit.objective, stated=(ONE_VOTE,)))


def test_a_run_that_never_counts_trajectories_has_no_segments_to_blame():
    assert {name for name in OPTIONS if applies(by_name("every-segment-votes"), name)} == {"verl v1"}
    assert of_fault(run_of("slime", segmented())) == [choose(ONE_VOTE).fix.code]


@pytest.mark.slow
def test_a_run_with_the_fix_is_not_accused():
    """Nothing states the fix, and the log has it."""
    fix = choose(ONE_VOTE)
    report = run_of("verl", segmented(), objective=fix.apply)
    assert not loud(report)
    assert next(one for one in report.audit if one.quantity == "advantages").with_fixes == (fix.label,)
