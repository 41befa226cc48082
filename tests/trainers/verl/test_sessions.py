"""Sessions of several outputs: verl's V1 trainer, whose own function gives the advantages, and its recorded batch."""

import os
import subprocess
import sys

import pytest
import torch
from objectives import objective_of
from recorders.test_verl import STEPS

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError, UsageError

KEYS = ("b_0_0", "a_1_0", "a_0_1", "a_0_0", "b_1_1", "a_2_0", "a_0_2", "b_1_0", "c_x_0_0", "a_2_1")
"""Out of order, as a batch that was balanced over ranks is; a session is alone in its group."""
REWARDS = {"a_0": 1.0, "a_1": 0.25, "a_2": 0.0, "b_0": 0.5, "b_1": 2.0, "c_x_0": 0.75}
ESTIMATORS = ("grpo", "grpo_vectorized")
LENGTHS = (3, 1, 4, 2, 2, 5, 1, 3, 2, 4)


def batch_of(mask: torch.Tensor, keys=KEYS, charged: float = 0.0) -> RolloutBatch:
    """The rows as `columns_of` gives them; `charged` is taken off the reward of the first."""
    from rolloutdoctor.trainers.verl.dump import trajectory_of

    prompts = [key.rsplit("_", 2)[0] for key in keys]
    names = sorted(set(prompts))
    rewards = torch.tensor([REWARDS[key.rsplit("_", 1)[0]] for key in keys], dtype=torch.float64)
    rewards[0] -= charged
    return RolloutBatch(
        step=0,
        rows=torch.tensor([0, *LENGTHS]).cumsum(0),
        groups=Groups.of(torch.tensor([names.index(prompt) for prompt in prompts])),
        per_row={"reward": rewards, "trajectory_id": torch.tensor([trajectory_of(key) for key in keys])},
        per_token={"response_mask": mask[torch.arange(mask.shape[1]) < torch.tensor(LENGTHS)[:, None]]},
        sample_ids=list(keys),
        group_ids=names,
    )


def whole_mask() -> torch.Tensor:
    """Every token, but the first of some rows."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask[[2, 5], 0] = False
    return mask


def emptied(*rows: int) -> torch.Tensor:
    """The mask without these rows."""
    mask = whole_mask()
    mask[list(rows)] = False
    return mask


CALLS = """
import numpy as np
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

found = {}
for name, (scores, mask, keys, estimator, divides) in torch.load("calls.pt").items():
    uids = np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)
    data = DataProto.from_dict({"token_level_rewards": scores, "response_mask": mask.long()}, {"uid": uids})
    made = compute_advantage_for_multi_trajectories(data, keys, estimator, norm_adv_by_std_in_grpo=divides, config=None)
    found[name] = made.batch["advantages"][torch.arange(len(keys)), mask.long().argmax(1)]
torch.save(found, "advantages.pt")
"""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """Each row's advantage at its first trained token, 0 without one, ``[N]``, by verl in its own process."""
    pytest.importorskip("verl")
    scores = torch.zeros(whole_mask().shape, dtype=torch.float64)
    scores[torch.arange(len(KEYS)), torch.tensor(LENGTHS) - 1] = batch_of(whole_mask()).per_row["reward"]
    folder, keys = tmp_path_factory.mktemp("verl"), list(KEYS)
    calls = {f"{name} {on}": (scores, whole_mask(), keys, name, on) for name in ESTIMATORS for on in (True, False)}
    calls |= {f"without {row}": (scores, emptied(row), keys, "grpo", True) for row in (3, 6)}
    torch.save(calls, folder / "calls.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEPS.split("import numpy")[0] + CALLS],
        cwd=folder,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "advantages.pt")


@pytest.mark.parity
@pytest.mark.slow(every=True)
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_session_votes_once_with_grpo_alone(upstream, estimator, divides):
    mask = whole_mask()
    wanted_N = upstream[f"{estimator} {divides}"]
    options = {"trainer__use_v1": True, "algorithm__norm_adv_by_std_in_grpo": divides}
    objective = objective_of("verl@0.9.1", adv_estimator=estimator, **options)
    found_N = evaluate_rows(batch_of(mask), objective, torch.float64).advantage_N
    torch.testing.assert_close(found_N, wanted_N.double(), rtol=1e-6, atol=1e-6)
    before = objective_of("verl@0.9.1", adv_estimator=estimator, **options | {"trainer__use_v1": False})
    gap = (evaluate_rows(batch_of(mask), before, torch.float64).advantage_N - wanted_N).abs().max()
    assert (gap > 0.1) == (estimator == "grpo")


@pytest.mark.parity
@pytest.mark.slow
def test_an_empty_last_output_takes_the_advantages_of_its_session(upstream):
    """So which row is empty matters, and rows do not say which is last."""
    grpo = objective_of("verl@0.9.1", adv_estimator="grpo")
    with_it = float(upstream["grpo True"][2])
    for row, left in ((6, 0.0), (3, with_it)):
        assert float(upstream[f"without {row}"][2]) == left
        with pytest.raises(
            CannotComputeError, match="rows have no trained token or are of a trajectory with such a row"
        ):
            evaluate_rows(batch_of(emptied(row)), grpo)
    assert with_it != 0
    assert float(evaluate_rows(batch_of(emptied(2, 3, 6)), grpo).advantage_N[2]) == pytest.approx(with_it, rel=1e-6)


def test_outputs_of_different_rewards_are_not_computed():
    keys = ("a_0_1", *KEYS[1:])
    with pytest.raises(CannotComputeError, match="another reward than the first"):
        evaluate_rows(batch_of(whole_mask(), keys, charged=0.1), objective_of("verl@0.9.1", adv_estimator="grpo"))


class Batch:
    """The two parts of a `DataProto` that are read."""

    def __init__(self, count: int) -> None:
        ones = torch.ones(count, 2)
        self.batch = {"responses": ones, "attention_mask": ones, "response_mask": ones}
        self.non_tensor_batch = {}


def test_keys_of_a_batch_are_trajectories():
    from rolloutdoctor.recorders.verl import columns_of

    found = columns_of(Batch(len(KEYS)), keys=KEYS)["trajectory_id"]
    sessions = [key.rsplit("_", 1)[0] for key in KEYS]
    for one, mine in zip(sessions, found, strict=True):
        assert [other == one for other in sessions] == [other == mine for other in found]
    assert "trajectory_id" not in columns_of(Batch(2))


@pytest.mark.parametrize("keys", [KEYS[:1], ("a_0_0", "a_1"), ("a_0_0", "a_x_0"), ("a_0_0", "a_0_-1")])
def test_keys_that_are_not_of_the_rows_are_refused(keys):
    from rolloutdoctor.recorders.verl import columns_of

    with pytest.raises(UsageError, match="of the form uid_session_output"):
        columns_of(Batch(2), keys=keys)
