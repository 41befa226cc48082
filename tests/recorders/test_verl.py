"""The verl recorder: verl's own `compute_advantage` calls the recorded estimator, and a whole `DataProto` is recorded.

verl's trainer module imports its serving stack, which is not here; those packages alone are stood in for, in a process
of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import rolloutdoctor as rd
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import UsageError

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

MODULE = """
from rolloutdoctor.recorders.verl import record_estimator
for name in ("grpo", "grpo_vectorized", "rloo", "opo", "reinforce_plus_plus"):
    record_estimator(name, f"{name}.parquet", config={"actor_rollout_ref.rollout.n": 4, "data.secret": 1})
"""

STEPS = """
import importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock

class Serving(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = ("uvicorn", "fastapi", "starlette", "transfer_queue", "aiohttp", "vllm", "sglang", "httpx")
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = MagicMock()
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module
    def exec_module(self, module):
        pass

sys.meta_path.append(Serving())
import numpy as np
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.ray_trainer import compute_advantage

def batch(step):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 7, (12,), generator=generator)
    mask = (torch.arange(7) < lengths[:, None]).long()
    scores = torch.zeros(12, 7)
    scores[torch.arange(12), lengths - 1] = torch.randint(-2, 5, (12,), generator=generator) / 4
    mask[5] = 0  # rejected
    return DataProto.from_dict(
        {"token_level_rewards": scores, "response_mask": mask},
        {"uid": np.array([f"prompt-{row // 4}" for row in range(12)], dtype=object)},
    )

found = {}
for name in ("grpo", "grpo_vectorized", "rloo", "opo", "reinforce_plus_plus"):
    config = AlgoConfig(adv_estimator=name, norm_adv_by_std_in_grpo=False)
    for step in (1, 2):
        data = [
            compute_advantage(batch(step), each, norm_adv_by_std_in_grpo=False, config=config).batch["advantages"]
            for each in (name, "recorded_" + name)
        ]
        assert torch.equal(*data), name
        found[name, step] = data[0]
torch.save(found, "advantages.pt")
config = AlgoConfig(adv_estimator="grpo", use_kl_in_reward=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A training's calls of the estimators, in a process of their own."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "recording.py").write_text(MODULE)
    more = {"TORCHDYNAMO_DISABLE": "1", "VERL_USE_EXTERNAL_MODULES": "recording", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEPS],
        cwd=folder,
        env={**os.environ, **more, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "opo", "reinforce_plus_plus"])
def test_a_recorded_estimator_computes_the_same_and_its_rows_give_its_advantages(folder, name):
    path = folder / f"{name}.parquet"
    rows = pq.read_table(path).to_pylist()
    metadata = RunMetadata.decode(pq.read_schema(path).metadata, "")
    assert metadata.trainer == "verl"
    assert metadata.config["algorithm.adv_estimator"] == name
    assert metadata.config["algorithm.norm_adv_by_std_in_grpo"] is False
    assert metadata.config["actor_rollout_ref.rollout.n"] == 4
    assert "data.secret" not in metadata.config
    upstream = torch.load(folder / "advantages.pt")
    rd.recompute(rd.open(path), folder / "tokens.parquet", dtype="float32")
    again = {
        (row["step"], row["sample_id"]): row["advantages_re"]
        for row in pq.read_table(folder / "tokens.parquet").to_pylist()
    }
    assert len(rows) == len(again) == 24
    for row in rows:
        expected = upstream[name, row["step"]][int(row["sample_id"])]
        length = len(row["response_mask"])
        assert row["advantages"] == expected[:length].tolist()
        assert not expected[length:].any()
        kept = [value * on for value, on in zip(row["advantages"], row["response_mask"], strict=True)]
        assert again[row["step"], row["sample_id"]] == pytest.approx(kept, rel=1e-6, abs=2e-6)
        assert row["group_id"] == f"prompt-{int(row['sample_id']) // 4}"
    (entry,) = rd.check(rd.open(path)).audit
    assert (entry.quantity, entry.agree, entry.not_compared) == ("advantages", entry.compared, 0)


@pytest.mark.slow
def test_what_a_rejected_row_does_to_its_group_is_found(folder):
    """The headline of verl's fault needs no log-prob."""
    report = rd.check(rd.open(folder / "grpo.parquet"), select=["RDA001"])
    assert [finding.code for finding in report.findings] == ["RDA001"]
    assert report.findings[0].verdict == "confirmed"


class Batch:
    """The two parts of a `DataProto` that are read."""

    def __init__(self, batch, non_tensor_batch):
        self.batch, self.non_tensor_batch = batch, non_tensor_batch


def test_a_whole_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    protocol = pytest.importorskip("verl.protocol")
    from rolloutdoctor.recorders.own_loop import StepRecorder
    from rolloutdoctor.recorders.verl import columns_of

    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 4, 1, 3])
    inside = (torch.arange(4) < lengths[:, None]).long()
    floats = {
        name: torch.randn(4, 4, generator=generator) * inside
        for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages", "token_level_scores")
    }
    rejected = inside * torch.tensor([1, 1, 0, 1])[:, None]
    data = protocol.DataProto.from_dict(
        {
            **floats,
            "responses": torch.arange(16).view(4, 4),
            "attention_mask": torch.cat([torch.ones(4, 3).long(), inside], 1),
            "response_mask": rejected,
        },
        {"uid": np.array(["a", "a", "b", "b"], dtype=object)},
    )
    with StepRecorder(tmp_path / "run.parquet", trainer="verl", version="0.9.1") as recorder:
        recorder.record_step(1, **columns_of(data, response_mask_pre=inside))
    rows = pq.read_table(tmp_path / "run.parquet").to_pylist()
    names = {"ref_log_prob": "ref_log_probs", "token_level_scores": "token_rewards"}
    for row, length in enumerate(lengths):
        assert rows[row]["response_ids"] == list(range(4 * row, 4 * row + int(length)))
        assert rows[row]["response_mask"] == rejected[row, :length].tolist()
        assert rows[row]["response_mask_pre"] == [1] * int(length)
        assert rows[row]["reward"] == pytest.approx(float(floats["token_level_scores"][row].sum()), rel=1e-6)
        for name, values in floats.items():
            assert rows[row][names.get(name, name)] == values[row, :length].tolist()
    assert [row["group_id"] for row in rows] == ["a", "a", "b", "b"]
    with pytest.raises(UsageError, match="has no attention_mask, response_mask"):
        columns_of(Batch({"responses": inside}, {}))


def tasks(infos, uids, prompts, sources=("gsm8k",)):
    """What `columns_of` takes the tasks of rows to be, of prompts that are padded on the left."""
    from rolloutdoctor.recorders.verl import columns_of

    rows = len(infos)
    ids = torch.tensor([[0] * (2 - len(prompt)) + list(prompt) for prompt in prompts])
    batch = {"prompts": ids, "responses": torch.ones(rows, 2).long(), "response_mask": torch.ones(rows, 2)}
    batch["attention_mask"] = torch.cat([(ids != 0).long(), torch.ones(rows, 2).long()], 1)
    others = {"uid": np.array(list(uids), dtype=object), "extra_info": np.array(infos, dtype=object)}
    others["data_source"] = np.array([*sources] * (rows // len(sources)), dtype=object)
    return columns_of(Batch(batch, others)).get("task_id")


def place(index, split="train"):
    return {"split": split, "index": index}


def test_a_task_is_a_place_in_the_data():
    infos = [place(3), place(3), place(np.int64(4)), place("b", None)]
    assert tasks(infos, "aabc", [(1, 2)] * 2 + [(5,)] * 2) == [
        *["gsm8k/train/3"] * 2,
        "gsm8k/train/4",
        "gsm8k/b",
    ]
    # Places begin anew in every source.
    assert tasks([place(0)] * 2, "ab", [(1,), (2,)], ("gsm8k", "math")) == ["gsm8k/train/0", "math/train/0"]


@pytest.mark.parametrize("info", [{}, None, {"index": None}, {"index": True}, {"index": 1.5}])
def test_data_without_places(info):
    """verl's own index is 0 for these."""
    assert tasks([info] * 2, "ab", [(1,), (2,)]) is None
    assert tasks([info, place(0)], "ab", [(1,), (2,)]) == [None, "gsm8k/train/0"]


def test_a_place_that_rows_of_two_prompts_share_names_no_task():
    assert tasks([place(0)] * 3, "abb", [(1,), (2,), (2,)]) is None
    assert tasks([place(0), place(0), place(1)], "abc", [(1,), (2,), (3,)]) is None
    # Groups by another key than the prompt, and an output of an agent that has a longer prompt.
    assert tasks([place(0)] * 3, "abc", [(1,)] * 3) == ["gsm8k/train/0"] * 3
    assert tasks([place(0)] * 3, "abb", [(1,), (1, 2), (1,)]) == ["gsm8k/train/0"] * 3
    # One prompt alone may be the one of every batch.
    assert tasks([place(0)] * 2, "aa", [(1,), (1,)]) is None


@pytest.mark.parametrize("keyed_by", ["rollout", "task"])
def test_rllm_names_the_task_of_its_rollouts(tmp_path, keyed_by):
    """Its workflow trainer keys verl's groups by the rollout: each is alone, and its advantage is its reward."""
    from rolloutdoctor.recorders.own_loop import StepRecorder
    from rolloutdoctor.recorders.verl import columns_of

    of_task = [f"task{row // 4}_solver" for row in range(16)]
    uids = of_task if keyed_by == "task" else [f"rollout {row}" for row in range(16)]
    mask = torch.ones(16, 2)
    scores = torch.zeros(16, 2)
    scores[:, 1] = torch.arange(16) % 2
    batch = {"responses": torch.ones(16, 2).long(), "attention_mask": torch.ones(16, 4).long(), "response_mask": mask}
    others = {"uid": np.array(uids, dtype=object), "trajectory_ids": np.array(of_task)}
    options = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
    with StepRecorder(tmp_path / "run.parquet", trainer="verl", version="0.9.1", config=options) as recorder:
        data = Batch(batch | {"token_level_scores": scores}, others)
        assert columns_of(data)["task_id"] == of_task
        recorder.record_step(1, **columns_of(data))
    codes = [found.code for found in rd.check(tmp_path / "run.parquet").findings]
    assert ("RDA022" in codes) == (keyed_by == "rollout")


def test_rows_whose_task_is_not_known_are_recorded(tmp_path):
    from rolloutdoctor.recorders.own_loop import StepRecorder

    with StepRecorder(tmp_path / "run.parquet", trainer="verl", version="0.9.1") as recorder:
        recorder.record_step(1, reward=[1.0, 0.0], task_id=[None, "gsm8k/train/0"])
        recorder.record_step(2, reward=[1.0, 0.0])
    read = [row["task_id"] for row in pq.read_table(tmp_path / "run.parquet").to_pylist()]
    assert read == [None, "gsm8k/train/0", None, None]


def test_estimators_that_verl_asks_for_by_name():
    from rolloutdoctor.recorders.verl import record_estimator

    for name in ("gae", "remax", "optimal_token_baseline", "mine"):
        with pytest.raises(UsageError, match=f"{name} cannot be recorded through an estimator"):
            record_estimator(name, Path("run.parquet"))
