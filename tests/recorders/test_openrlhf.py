"""The recorder of OpenRLHF: wrapped at import, with the reference that experiences drop, and never in the way."""

import importlib
import sys
from types import SimpleNamespace as Space

import pyarrow.parquet as pq
import pytest
import torch

from rolloutdoctor.io.run import open_run
from rolloutdoctor.recorders import openrlhf

SOURCE = """
class RemoteExperienceMaker:
    def make(self, experiences):
        for one in experiences:
            one.kl = compute_approx_kl(one.action_log_probs, one.reference, kl_estimator="k1")
        return self.compute_advantages_and_returns(experiences)

    def compute_advantages_and_returns(self, experiences):
        for one in experiences:
            one.rewards -= 0.5
            one.advantages = one.rewards.unsqueeze(1) * one.action_mask
            one.kl = None
        return experiences


def compute_approx_kl(log_probs, base, kl_estimator="k1"):
    return log_probs - base
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A package of OpenRLHF's name that makes experiences as it does."""
    folder = tmp_path / "packages" / "openrlhf" / "trainer" / "ppo_utils"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent, folder.parent.parent):
        (each / "__init__.py").write_text("")
    (folder / "experience_maker.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]


def args():
    return Space(
        algo=Space(advantage=Space(estimator="dr_grpo", gamma=1.0), kl=Space(init_coef=0.1, use_loss=False)),
        reward=Space(clip_range=(-10, 10)),
        rollout=Space(n_samples_per_prompt=2),
    )


def experience(index):
    """Rows of two tokens of prompt; the second row has a tool's token, the last place of the first is padding."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1]]).bool()
    log_probs = -torch.rand(2, 4) * mask
    return Space(
        index=index,
        sequences=torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 8]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        action_mask=mask,
        action_log_probs=log_probs,
        reference=log_probs - 0.25,
        base_action_log_probs=None,
        rollout_log_probs=log_probs + 0.01,
        values=None,
        rewards=torch.tensor([1.0, 0.0]),
        truncated=torch.tensor([False, True]),
    )


def rolled(made):
    maker = importlib.import_module(openrlhf.MODULE).RemoteExperienceMaker()
    maker.args = args()
    return maker.make(made)


def test_a_run_is_recorded_from_its_import_on(tmp_path, monkeypatch, packages):
    monkeypatch.setenv(openrlhf.VARIABLE, str(tmp_path / "run.parquet"))
    recorders = []
    made = openrlhf.StepRecorder
    monkeypatch.setattr(openrlhf, "StepRecorder", lambda *a, **k: recorders.append(made(*a, **k)) or recorders[-1])
    openrlhf.setup()
    for _ in range(2):
        rolled([experience([0, 1]), experience([3, 2])])
    recorders[0].close()
    rows = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert [(row["step"], row["sample_id"], row["group_id"]) for row in rows[:5]] == [
        *((1, "0", "0"), (1, "1", "0"), (1, "3", "1"), (1, "2", "1"), (2, "0", "0")),
    ]
    first, second = rows[:2]
    assert (first["prompt_ids"], first["response_ids"], first["response_mask"]) == ([5, 6], [7, 8], [1, 1])
    assert (second["prompt_ids"], second["response_ids"], second["response_mask"]) == ([5, 6], [7, 9, 8], [1, 0, 1])
    assert (first["reward"], second["reward"], second["status"]) == (0.5, -0.5, "truncated")  # after the penalty
    assert first["advantages"] == [0.5, 0.5]
    assert first["ref_log_probs"] == pytest.approx([x - 0.25 for x in first["old_log_probs"]])
    metadata = open_run([str(tmp_path / "run.parquet")]).metadata
    assert metadata.trainer == "openrlhf"
    assert metadata.config["algo.advantage.estimator"] == "dr_grpo"
    assert metadata.config["reward.clip_range"] == [-10, 10]


def test_without_the_variable_nothing_is_wrapped(monkeypatch, packages):
    monkeypatch.delenv(openrlhf.VARIABLE, raising=False)
    before = list(sys.meta_path)
    openrlhf.setup()
    assert sys.meta_path == before


def test_what_cannot_be_recorded_ends_the_recording_and_not_the_training(tmp_path, packages):
    openrlhf.record(tmp_path / "run.parquet")
    broken = experience([0, 1])
    broken.sequences = None
    with pytest.warns(RuntimeWarning, match="does not record"):
        assert rolled([broken])[0].advantages is not None
    assert rolled([experience([0, 1])])
    assert not any(isinstance(one, openrlhf._WhenImported) for one in sys.meta_path)
