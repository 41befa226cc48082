"""The pictures of the audit and of the rewards: what they are made of is what `check` and the rows say."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import rolloutdoctor as rd
from rolloutdoctor.commands.plot.query import draw
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.pictures.gather.marks import marked
from rolloutdoctor.pictures.table import PICTURES
from rolloutdoctor.results.audit import AuditEntry
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import Gallery
from rolloutdoctor.results.findings import InputSummary, Report
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.options import Layer

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


def sample(name):
    return open_run([SAMPLES / f"{name}.parquet"])


def options(**values):
    return CheckOptions(split="train", layers=[Layer("test", values)] if values else [])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("name", "values"), [("healthy", {}), ("healthy", {"scale_rewards": "none"}), ("slime_ppo", {})]
)
def test_the_counts_are_those_of_the_audit(name, values):
    data, report = draw(sample(name), "audit", options(**values)), check(sample(name), options(**values))
    counts = {one.quantity: (one.compared, one.agree, one.not_compared) for one in data.quantities}
    # What nothing was compared with has no place in the picture.
    drawn = [one for one in report.audit if one.compared or one.quantity in counts]
    assert counts == {one.quantity: (one.compared, one.agree, one.not_compared) for one in drawn}
    worst = {one.quantity: one.worst for one in report.audit}
    for one in data.quantities:
        assert max(one.worst) == max(point[2] for point in one.points) == pytest.approx(min(worst[one.quantity], 1e9))
        assert len(one.points) <= 120


@pytest.fixture(scope="module")
def differing():
    """The picture of a healthy run beside an option that it did not have."""
    return draw(sample("healthy"), "audit", options(scale_rewards="none"))


@pytest.mark.slow
def test_values_that_differ_come_first(differing):
    assert [one.quantity for one in differing.quantities if one.differs] == ["advantages", "loss"]
    assert [one.quantity for one in differing.quantities[:3]] == ["advantages", "loss", "kl"]


@pytest.mark.slow
def test_a_fix_is_compared_beside_the_options():
    data = draw(sample("verl_rejected"), "audit", options(), [choose("rejected-rows")])
    (one,) = [one for one in data.quantities if one.quantity == "advantages"]
    assert one.agree == one.compared == 1486
    assert one.agree_after == 1486 - 296
    assert max(one.worst) <= 1 < max(one.after)


@pytest.mark.slow
def test_a_run_with_a_known_fix_in_place_is_not_accused(differing):
    entries = tuple(AuditEntry(name, 9, 9, 0.5, with_fixes=("rejected-rows",)) for name in ("advantages", "loss"))
    report = replace(Report("0", "cpu", "float32", InputSummary()), audit=entries)
    found = marked(Gallery({"audit": differing}, {}), report, logged=True).drawn["audit"]
    assert not any(one.differs for one in found.quantities)
    assert "with rejected-rows" in PICTURES["audit"].title(found)


def log(tmp_path, **series):
    lines = [
        json.dumps({"step": step, "split": "train", "name": name, "value": value})
        for name, values in series.items()
        for step, value in enumerate(values, 1)
    ]
    path = tmp_path / "run.metrics.jsonl"
    path.write_text("\n".join(lines))
    return rd.open(path, trainer="trl")


def test_a_log_alone_is_compared_with_itself(tmp_path):
    shares = {"clip_ratio/low_mean": [0.1, 0.1], "clip_ratio/high_mean": [0.2, 0.2]}
    data = draw(log(tmp_path, **shares, **{"clip_ratio/region_mean": [0.3, 0.5]}), "audit", CheckOptions())
    assert data.of_log
    one = data.quantities[0]
    assert one.quantity == "clip_ratio/region_mean = clip_ratio/low_mean + clip_ratio/high_mean"
    assert (one.compared, one.agree, one.steps) == (2, 1, (1, 2))
    assert one.worst[0] <= 1 < one.worst[1]
    assert {point[:2] for point in one.points} == {(0.3, 0.1 + 0.2), (0.5, 0.1 + 0.2)}


def test_a_log_in_which_nothing_is_said_twice_has_no_picture(tmp_path):
    with pytest.raises(InputError, match="no identity is known between its metrics"):
        draw(log(tmp_path, **{"of my own": [1.0, 2.0]}), "audit", CheckOptions())


def test_a_run_that_logged_nothing_says_what_to_record(tmp_path):
    path = tmp_path / "bare.parquet"
    pl.read_parquet(SAMPLES / "run.parquet").drop("advantage").write_parquet(path)
    with pytest.raises(InputError, match="nothing was logged that could be compared"):
        draw(rd.open(path), "audit", CheckOptions(trainer="trl"))


def test_rewards_are_those_of_the_rows():
    data = draw(sample("healthy"), "rewards", CheckOptions())
    rows = pl.read_parquet(SAMPLES / "healthy.parquet").filter(split="train").unnest("rewards")
    by_step = rows.group_by("step").agg(pl.mean("reward", "exact", "digits")).sort("step")
    assert data.steps == tuple(by_step["step"])
    for one in data.series:
        assert one.mean == pytest.approx(tuple(by_step[one.name]))
    groups = rows.group_by("step", "group_id").agg(
        size=pl.len(), passed=(pl.col("exact") == 1).sum(), equal=pl.col("reward").n_unique() == 1
    )
    assert (data.passing, data.size, data.groups) == ("exact", 8, len(groups))
    assert (data.all_fail, data.all_pass) == tuple((groups["passed"] == count).sum() for count in (0, 8))
    assert data.all_equal == groups["equal"].sum()
    for number, shares in enumerate(data.shares):
        wanted = groups.group_by("step").agg(share=(pl.col("passed") == number).mean()).sort("step")
        assert shares == pytest.approx(tuple(wanted["share"]))


def of_rewards(tmp_path, rows):
    path = tmp_path / "run.parquet"
    columns = [{"step": step, "group_id": group, "reward": reward} for step, group, reward in rows]
    pl.DataFrame(columns, schema={"step": pl.Int64, "group_id": pl.String, "reward": pl.Float64}).write_parquet(path)
    return draw(open_run([path]), "rewards", CheckOptions())


def test_groups_of_other_sizes_and_rewards_that_are_missing(tmp_path):
    """A group of one is none; a third passes in a group of three, which is nearest to one of four."""
    rows = [(1, "a", 1.0), (1, "a", 0.0), (1, "a", 0.0), (1, "a", 0.0), (1, "b", 1.0), (1, "b", 0.0), (1, "b", 0.0)]
    data = of_rewards(tmp_path, [*rows, (1, "b", None), (1, "c", 1.0), (2, "d", float("nan")), (2, "d", None)])
    assert (data.passing, data.size, data.groups) == ("reward", 4, 2)
    assert [share[0] for share in data.shares] == [0, 1, 0, 0, 0]
    assert [repr(share[1]) for share in data.shares] == ["nan"] * 5
    assert data.steps == (1, 2)


def test_rewards_of_many_values_have_no_pass_rate(tmp_path):
    data = of_rewards(tmp_path, [(1, "a", 1.0), (1, "a", 0.5), (1, "b", 0.25), (1, "b", 0.25)])
    assert (data.passing, data.shares, data.all_equal, data.groups) == ("", (), 1, 2)
    assert data.equal == (0.5,)
