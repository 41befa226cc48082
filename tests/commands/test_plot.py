"""What pictures are made of, against worked numbers; one pass gives what the separate passes give."""

import math
from pathlib import Path

import pytest
import torch

from rolloutdoctor.commands.plot.query import Pictures, check_and_draw, draw
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.run_steps import StepDispatcher
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.figures import KINDS, MOST_BANDS, Band, banded
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.search.hypotheses.fixes import choose

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


def sample(name):
    return open_run([SAMPLES / f"{name}.parquet"])


@pytest.mark.slow
def test_one_pass_finds_and_draws_what_separate_passes_do():
    name = "slime_ppo"
    report, gallery = check_and_draw(sample(name), KINDS, CheckOptions())
    assert report == check(sample(name), CheckOptions())
    for kind in KINDS:
        if kind in gallery.drawn:
            alone = draw(sample(name), kind, CheckOptions())
            assert repr(alone) == repr(gallery.drawn[kind])
        else:
            with pytest.raises(InputError, match=f"no picture of {kind}"):
                draw(sample(name), kind, CheckOptions())
    assert set(gallery.left_out) == {"baseline", "loss", "mismatch"}


@pytest.mark.slow
def test_a_report_reads_the_file_once(monkeypatch):
    run, passes = sample("slime_ppo"), []
    batches = run.batches
    monkeypatch.setattr(run, "batches", lambda *args, **kwargs: passes.append(1) or batches(*args, **kwargs))
    check_and_draw(run, KINDS, CheckOptions())
    assert passes == [1]


@pytest.mark.slow
def test_advantages_and_baselines_are_those_of_the_rule():
    """The rule about rejected rows counts the same flips, and its mean drift weighs groups by their rows."""
    data = draw(sample("verl_rejected"), "advantages", CheckOptions(), [choose("rejected-rows")])
    (found,) = [one for one in check(sample("verl_rejected"), CheckOptions()).findings if one.code == "RDA001"]
    assert data.flipped.total == found.measures["sign_flips"].value == 8
    assert data.before.total == data.after.total == 1486
    assert sum(band.before.total for band in data.bands) == 1486
    base = draw(sample("verl_rejected"), "baseline", CheckOptions())
    # Of the groups with such a row, some have a baseline that stays where it is.
    assert 49 == found.measures["affected_groups"].value <= base.drift.total == 54
    assert sum(count for _, _, count in base.points) == 54
    assert max(abs(drift) for _, drift, _ in base.points) == pytest.approx(
        found.measures["baseline_drift_max"].value, abs=0.005
    )
    assert sum(band.flipped for band in data.bands) == 8
    assert base.untouched + base.undefined + 54 == 200


def test_a_corrupted_series_is_solved_back():
    data = draw(sample("slime_ppo"), "kl", CheckOptions())
    assert data.metric == "rollout/kl"
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(data.inverted, data.recomputed, strict=True))
    close = sum(math.isclose(a, b, rel_tol=0.01) for a, b in zip(data.logged, data.recomputed, strict=True))
    assert (close, len(data.steps)) == (2, 25)  # where the two curves cross
    fixed = draw(sample("slime_ppo"), "kl", CheckOptions(), [choose("kl-inplace")])
    assert fixed.after == pytest.approx(data.recomputed)


@pytest.mark.slow
def test_the_parts_of_the_gradient_are_those_of_the_objective():
    run = sample("run")
    data = draw(run, "gradient", CheckOptions())
    (found,) = [one for one in check(run, CheckOptions()).findings if one.code == "RDG001"]
    share = math.fsum(w * s for w, s in zip(data.whole, data.spurious, strict=True)) / math.fsum(data.whole)
    assert share == pytest.approx(found.measures["grad_share_l1"].value, rel=1e-6)
    for whole, policy, kl in zip(data.whole, data.policy, data.kl, strict=True):
        assert abs(policy - kl) * (1 - 1e-5) <= whole <= (policy + kl) * (1 + 1e-5)


def test_ratios_are_those_of_the_trained_tokens():
    run = sample("verl_rejected")
    data = draw(run, "ratio", CheckOptions())
    inside = outside = 0
    columns = {"response_mask", "old_log_probs", "policy_log_probs", "rollout_log_probs"}
    for batch in run.batches(columns):
        mask = batch.column("response_mask")
        ratio = (batch.column("policy_log_probs") - batch.column("old_log_probs"))[mask].exp()
        outside += int(((ratio < 1 - data.clip_low) | (ratio > 1 + data.clip_high)).sum())
        inside += len(ratio)
    assert (data.log_ratio.total, data.outside) == (inside, outside)
    assert data.gap.total == inside
    assert len(data.steps) == 100


def zero_std_tokens(run):
    """Trained tokens of the groups whose rewards are all equal, by a loop, and all trained tokens."""
    inside = total = 0
    for batch in run.batches({"reward", "response_mask"}, split="train"):
        lengths = [int(part.sum()) for part in batch.column("response_mask").split(batch.rows.diff().tolist())]
        rewards = {}
        for group, reward in zip(batch.groups.index_N.tolist(), batch.column("reward").tolist(), strict=True):
            rewards.setdefault(group, set()).add(reward)
        for group, length in zip(batch.groups.index_N.tolist(), lengths, strict=True):
            total += length
            inside += length if len(rewards[group]) == 1 else 0
    return inside, total


@pytest.mark.slow
def test_a_fix_that_masks_tokens_is_seen_in_their_kl_and_ratios():
    run = sample("run")
    inside, total = zero_std_tokens(run)
    assert 0 < inside < total
    kl = draw(run, "kl", CheckOptions(), [choose("zero-std")])
    assert (kl.tokens.total, kl.tokens_after.total) == (total, total - inside)
    assert draw(run, "kl", CheckOptions()).tokens_after is None
    ratio = draw(run, "ratio", CheckOptions(), [choose("zero-std:pr5640")])
    assert (ratio.log_ratio.total, ratio.log_ratio_after.total) == (total, total - inside)
    assert ratio.fix == "zero-std:pr5640"
    assert len(ratio.outside_after) == len(ratio.steps)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("fix", ["zero-std", "rejected-rows"])
def test_a_fix_that_moves_no_ratio_is_refused_and_left_out_of_a_report(fix):
    """A page draws the ratios as they are; a picture of before and after would show the same twice."""
    with pytest.raises(UsageError, match=rf"--fix {fix}:\S+ changes no importance ratio and no trained token"):
        draw(sample("run"), "ratio", CheckOptions(), [choose(fix)])
    _, gallery = check_and_draw(sample("run"), KINDS, CheckOptions(), [choose(fix)])
    assert repr(gallery.drawn["ratio"]) == repr(draw(sample("run"), "ratio", CheckOptions()))


def test_bands_of_steps_do_not_depend_on_their_order():
    one = Histogram(0, 0, (1,))
    bands = [Band(step * 7, step * 7, one, None, 1) for step in range(100)]
    found = banded(bands)
    shuffled = banded(bands[50:70])
    for band in [*bands[70:], *bands[:50][::-1]]:
        shuffled = banded([*shuffled, band])
    assert found == shuffled
    assert len(found) <= MOST_BANDS
    assert sum(band.before.total for band in found) == 100
    assert sum(band.flipped for band in found) == 100
    assert found[0].first_step == 0
    assert found[-1].last_step == 693


def test_a_missing_column_is_said_with_what_records_it():
    with pytest.raises(InputError, match=r"no picture of kl: the configuration has no KL term"):
        draw(sample("run"), "kl", CheckOptions(layers=[layer(beta=0.0)]))
    with pytest.raises(InputError, match=r"no train rows that could be evaluated"):
        draw(sample("run"), "ratio", CheckOptions(steps=steps("5000:")))


def test_a_fix_of_another_trainer_is_refused():
    with pytest.raises(UsageError, match="applies to slime"):
        draw(sample("run"), "kl", CheckOptions(), [choose("kl-inplace")])


def layer(**values):
    from rolloutdoctor.trainers.options import Layer

    return Layer("test", values)


def steps(text):
    from rolloutdoctor.io.run import StepRange

    return StepRange.parse(text)


def test_without_a_trainer_there_is_nothing_to_draw():
    from rolloutdoctor.rules.base import Context

    pictures = Pictures(KINDS, Context(columns=frozenset()), ())
    assert set(pictures.left_out) == {*KINDS} - {"overview"}
    of_rows = {"mismatch", "lengths", "rewards"}
    assert all("--trainer NAME" in why for kind, why in pictures.left_out.items() if kind not in of_rows)
    StepDispatcher([*pictures.figures.values()], torch.float32).step(next(iter(sample("run").batches(set()))), {})
    assert [*pictures.gallery().drawn] == ["overview"]
