"""Groups larger than configured are refused before any rule."""

import pytest
from engine.runs import TRL, VERL, small, write

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.joined_steps import StepsTogether
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.rules.table import find
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.table import ALIASES


def _said(metadata, **options):
    return metadata | {"config": metadata["config"] | options}


def _check(*paths, **options):
    return check(open_run(paths, aliases=ALIASES), CheckOptions(rules=[find("RDI001")], device="cpu", **options))


def test_a_group_above_num_generations(tmp_path):
    path = write(tmp_path / "run.parquet", small(group_id=["a"] * 4), _said(TRL, num_generations=2))
    with pytest.raises(InputError) as caught:
        _check(path)
    assert str(caught.value) == (
        f"{path}: group 'a' of step 0 has 4 rows where num_generations is 2 (file metadata); "
        "if the file holds several runs, split it; if not, state --set num_generations=4"
    )
    assert _check(path, layers=[Layer("command line", {"num_generations": "4"})]).coverage.tested == 1


def test_what_was_only_assumed_refuses_nothing(tmp_path):
    columns = small(group_id=["a"] * 4) | {"step": [0] * 4}
    twelve = {name: cells * 3 for name, cells in columns.items()} | {"sample_id": [str(row) for row in range(12)]}
    assert _check(write(tmp_path / "run.parquet", twelve, TRL)).coverage.tested == 1


def test_smaller_groups_are_no_error(tmp_path):
    assert _check(write(tmp_path / "run.parquet", small(), _said(TRL, num_generations=3))).coverage.tested == 1


def test_two_seeds_of_a_trainer_with_groups_of_any_size(tmp_path):
    said = _said(VERL, **{"actor_rollout_ref.rollout.n": 2})
    paths = [
        write(tmp_path / f"{name}.parquet", small(sample_id=[f"{name}{row}" for row in range(4)]), said)
        for name in "ab"
    ]
    with pytest.raises(InputError, match=r"has 4 rows where actor_rollout_ref\.rollout\.n is 2") as caught:
        _check(*paths)
    assert "a.parquet and 1 more: group" in str(caught.value)
    assert "check them with --each" in str(caught.value)
    # One file with one large group may be what the trainer made.
    assert _check(write(tmp_path / "c.parquet", small(group_id=["a"] * 4), said)).coverage.tested == 1


def of_steps(*sizes):
    """Steps of a prompt each, of so many responses; small, so that they are evaluated together."""
    step = [number for number, size in enumerate(sizes) for _ in range(size)]
    count = len(step)
    return {
        "step": step,
        "group_id": [f"prompt {number}" for number in step],
        "sample_id": [str(row) for row in range(count)],
        "reward": [float(row % 2) for row in range(count)],
        "response_mask": [[1, 1]] * count,
        "policy_log_probs": [[-1.0, -1.0]] * count,
        "ref_log_probs": [[-1.5, -1.5]] * count,
    }


def test_a_group_above_num_generations_among_steps_that_share_a_pass(tmp_path, monkeypatch):
    joined, before = [], StepsTogether.whole

    def counting(self, *given):
        joined.append(len(self.batches))
        return before(self, *given)

    monkeypatch.setattr(StepsTogether, "whole", counting)
    said = _said(TRL, num_generations=2)
    assert _check(write(tmp_path / "right.parquet", of_steps(2, 2, 2, 2), said)).coverage.tested == 1
    with pytest.raises(InputError) as caught:
        _check(write(tmp_path / "run.parquet", of_steps(2, 2, 3, 2, 4), said))
    # Its own name and its own step, not those of the steps that it is evaluated with.
    assert "run.parquet: group 'prompt 2' of step 2 has 3 rows where num_generations is 2" in str(caught.value)
    assert joined == [4, 5]
