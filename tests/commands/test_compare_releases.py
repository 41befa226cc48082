"""`compare` of runs of two releases says which metrics of one name they count differently."""

import math

import pytest

import rolloutdoctor as rd
from rolloutdoctor.trainers.table import TRAINERS

BEFORE = "val-core/math/acc/mean@4:{acc:.4f}"
AFTER = "val-core/math/acc/mean@4:{acc:.4f} - val-aux/math/acc_success_only/mean@4:{only:.4f}"
PART = "critic/rewards/mean:0.5 - actor/pg_loss:0.01 - actor/grad_norm:0.3"


def log(path, line, *, more=PART):
    path.write_text("".join(f"step:{n} - {line.format(acc=0.5, only=0.625)} - {more}\n" for n in range(1, 5)))
    return path


def notes(tmp_path, one, other):
    paths = [log(tmp_path / f"{name}.log", line) for name, line in (("a", one), ("b", other))]
    return [note for note in rd.compare(*paths).notes if "acc_success_only" in note]


def test_the_run_that_counts_failed_sessions_is_named(tmp_path):
    (note,) = notes(tmp_path, BEFORE, AFTER)
    assert note.startswith("B counts a session that failed as 0")
    assert "A leaves it out" in note
    (note,) = notes(tmp_path, AFTER, BEFORE)
    assert note.startswith("A counts")


@pytest.mark.slow
def test_nothing_is_said_of_two_runs_of_one_kind_or_without_an_accuracy(tmp_path):
    assert notes(tmp_path, BEFORE, BEFORE) == []
    assert notes(tmp_path, AFTER, AFTER) == []
    assert notes(tmp_path, "val-core/math/reward/mean@4:{acc:.4f}", AFTER) == []


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_what_verl_makes_of_failed_sessions(failed):
    """The release that has the second metric is the one that counts failed sessions in the first."""
    utils = pytest.importorskip("verl.trainer.ppo.metric_utils")
    acc = [1.0, 0.0, 1.0, 1.0][: 4 - failed]
    count = len(acc)
    made = utils.process_validation_metrics(
        ["math"] * count, ["p"] * count, {"acc": acc}, expected_acc_counts={("math", "p"): 4}
    )["math"]
    assert made["acc"]["mean@4"] == pytest.approx(sum(acc) / 4)
    assert made["acc_success_only"][f"mean@{count}"] == pytest.approx(sum(acc) / count)
    before = utils.process_validation_metrics(["math"] * count, ["p"] * count, {"acc": acc})["math"]
    assert before["acc"][f"mean@{count}"] == pytest.approx(sum(acc) / count)
    assert "acc_success_only" not in before
    assert math.isclose(made["acc"]["mean@4"], before["acc"][f"mean@{count}"]) == (failed == 0)


@pytest.mark.parametrize(("version", "metric"), [("0.9.0", None), ("0.9.1", "reward")])
def test_the_default_of_filtered_groups_is_that_of_the_release(version, metric):
    from rolloutdoctor.trainers.options import resolve
    from rolloutdoctor.trainers.releases import parse_version

    config = resolve(TRAINERS["verl"].options, parse_version(version), [], trainer="verl")
    assert config["algorithm.filter_groups.metric"] == metric
