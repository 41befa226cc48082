"""`record_step` for a loop of one's own: what is given comes back, in any shape; the example of its page runs."""

import re
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import rolloutdoctor as rd
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.recorders.own_loop import StepRecorder
from rolloutdoctor.results.errors import UsageError

LENGTHS = [3, 1, 4, 2]


def padded(seed, dtype=torch.float32):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(values):
    return [row[:length].tolist() for row, length in zip(values, LENGTHS, strict=True)]


def recorded(path, **columns):
    with StepRecorder(path) as recorder:
        recorder.record_step(7, **columns)
    return pq.read_table(path).to_pydict()


SHAPES = {
    "tensor": lambda values: values,
    "on the graph": lambda values: values.clone().requires_grad_() * 1,
    "array": lambda values: values.numpy(),
    "lists": cut,
    "tensors": lambda values: [row[:length] for row, length in zip(values, LENGTHS, strict=True)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_given_comes_back(tmp_path, shape):
    policy, ref = padded(1), padded(2)
    ids = torch.arange(20).view(4, 5)
    found = recorded(
        tmp_path / "run.parquet",
        lengths=torch.tensor(LENGTHS) if shape != "lists" else LENGTHS,
        group_id=np.array([10, 10, 11, 11]),
        reward=torch.tensor([0.5, 1.0, float("nan"), 2.0]),
        rewards={"exact": [1, 0, 1, 0], "style": torch.tensor([0.1, 0.2, 0.3, float("nan")]).double()},
        response_ids=ids.tolist() if shape == "never" else ids,
        response_mask=(padded(3) > 0).float(),
        policy_log_probs=SHAPES[shape](policy),
        ref_log_probs=SHAPES[shape](ref),
        prompt_ids=[[1], [1], [1, 2, 3], [1, 2, 3]],
        prompt=["a", "a", "b", "b"],
        entropy=None,
        metrics={"loss": torch.tensor(0.25), "kl": None},
    )
    assert found["step"] == [7] * 4
    assert found["split"] == ["train"] * 4
    assert found["group_id"] == ["10", "10", "11", "11"]
    assert found["sample_id"] == ["0", "1", "2", "3"]
    assert found["reward"][:2] + found["reward"][3:] == [0.5, 1.0, 2.0]
    assert found["rewards"][0] == {"exact": 1.0, "style": 0.1 + (np.float64(torch.tensor(0.1).item()) - 0.1)}
    assert found["rewards"][3]["style"] is None
    assert found["policy_log_probs"] == cut(policy)
    assert found["ref_log_probs"] == cut(ref)
    assert found["response_ids"] == cut(ids)
    assert found["response_mask"] == cut((padded(3) > 0).int())
    assert found["prompt_ids"] == [[1], [1], [1, 2, 3], [1, 2, 3]]
    assert "entropy" not in found
    logged = pq.read_table(tmp_path / "run.metrics.parquet").to_pylist()
    assert [(entry["step"], entry["name"], entry["value"]) for entry in logged] == [(7, "loss", 0.25), (7, "kl", None)]


def test_half_precision_and_what_is_changed_afterwards(tmp_path):
    policy, mask = padded(1, torch.bfloat16), np.ones((4, 5))
    expected = cut(policy.float())
    with StepRecorder(tmp_path / "run.parquet", trainer="trl", version="1.16.0", config={"beta": 0.1}) as recorder:
        recorder.record_step(1, lengths=LENGTHS, policy_log_probs=policy, response_mask=mask, reward=[1.0] * 4)
        policy.zero_()
        mask[:] = 5
    found = pq.read_table(tmp_path / "run.parquet")
    assert found["policy_log_probs"].to_pylist() == expected
    assert found["response_mask"].to_pylist() == [[1] * length for length in LENGTHS]
    metadata = RunMetadata.decode(found.schema.metadata, "")
    assert (metadata.trainer, metadata.trainer_version, metadata.config) == ("trl", "1.16.0", {"beta": 0.1})


def test_ranks_and_splits(tmp_path):
    for rank in (0, 1):
        with StepRecorder(tmp_path / "run.parquet", rank=rank) as recorder:
            for split in ("train", "eval"):
                recorder.record_step(1, split=split, reward=[1.0, 2.0], group_id=["a", "a"])
    run = rd.open(str(tmp_path / "run.rank*.parquet"))
    rows = [row for rank in (0, 1) for row in pq.read_table(tmp_path / f"run.rank{rank}.parquet").to_pylist()]
    assert len({(row["split"], row["sample_id"]) for row in rows}) == len(rows) == 8
    assert {row["rank"] for row in rows} == {0, 1}
    assert "rank" in run.columns


WRONG = {
    "'rewrad' is none; did you mean 'reward'": {"rewrad": [1.0]},
    "is given by the recorder itself": {"rank": [1]},
    "'policy_log_probs' is padded: lengths= says": {"policy_log_probs": np.zeros((2, 3))},
    "'prompt_ids' is padded: give one list": {"prompt_ids": np.zeros((2, 3), int), "lengths": [1, 2]},
    "has 2 rows where lengths has 3": {"policy_log_probs": np.zeros((2, 3)), "lengths": [1, 2, 3]},
    "a mask holds other values": {"response_mask": [[0.5], [1.0]]},
    "padded to 3 tokens where a row has 4": {"policy_log_probs": np.zeros((2, 3)), "lengths": [1, 4]},
    "has 2 tokens where": {"policy_log_probs": [[0.0], [0.0]], "ref_log_probs": [[0.0], [0.0, 0.0]]},
    "the columns differ in length": {"reward": [1.0], "policy_log_probs": [[0.0], [0.0]]},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_mistake_ends_the_recording_with_one_warning(tmp_path, sentence):
    recorder = StepRecorder(tmp_path / "run.parquet")
    recorder.record_step(1, reward=[1.0, 2.0])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        recorder.record_step(2, **WRONG[sentence])
        recorder.record_step(3, reward=[3.0, 4.0])
        recorder.close()
        recorder.record_step(4, reward=[3.0, 4.0])
    assert len(warned) == 1
    assert re.search(sentence, str(warned[0].message))
    steps = set(pq.read_table(tmp_path / "run.parquet")["step"].to_pylist())
    assert 1 in steps
    assert 2 not in steps
    assert 4 not in steps


def test_nothing_can_be_written_there(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file"):
        StepRecorder(tmp_path / "file" / "run.parquet")


def test_the_example_of_the_page(tmp_path, monkeypatch):
    """The loop of the docs runs as it stands, and check finds nothing wrong with what it records."""
    page = (Path(__file__).parents[2] / "docs" / "columns.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "record_step" in block)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "columns.md", "exec"), {})
    report = rd.check(rd.open("run.parquet"))
    assert not [finding for finding in report.findings if finding.severity == "error"]
    recomputed = rd.recompute(rd.open("run.parquet"), dtype="float32")
    for step in recomputed.steps:
        assert step.before.metrics["kl"] == pytest.approx(step.logged["kl"], rel=1e-5, abs=1e-9)
        assert step.before.loss == pytest.approx(step.logged["loss"], rel=1e-5, abs=1e-7)
    assert len(recomputed.steps) == 3
