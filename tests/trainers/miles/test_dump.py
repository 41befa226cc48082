"""miles' dumps, which its own functions wrote: shards of ranks joined, and the log-probs at the loss beside them."""

import shutil

import pytest
import torch
from importers.importing import DATA, converted, findings

from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError

DUMP = DATA / "miles"


@pytest.fixture
def dump(tmp_path):
    return shutil.copytree(DUMP, tmp_path / "dump")


def edited(path, change):
    body = torch.load(path, weights_only=True)
    change(body)
    torch.save(body, path)


def rows_of(tmp_path, dump):
    return converted(tmp_path / "run.parquet", dump)


def test_it_is_known_by_its_folders(tmp_path, dump):
    for path in (dump, dump / "train_data"):
        assert detect_dump([str(path)], ConvertOptions()).importer.name == "miles"
    assert detect_dump([str(DATA / "slime")], ConvertOptions()).importer.name == "slime"


def test_each_row_is_that_of_its_shard(tmp_path, dump):
    rows, sink = rows_of(tmp_path, dump)
    assert list(sink.notes) == ["1 evaluation files (eval_*.pt) carry no group and are left out"]
    assert len(rows) == 26
    for row in rows:
        shard = torch.load(dump / "train_data" / f"{row['step']}_{row['rank']}.pt", weights_only=True)["rollout_data"]
        place = shard["sample_indices"].index(13 * row["step"] + int(row["sample_id"]))
        assert row["old_log_probs"] == shard["log_probs"][place].tolist()
        assert row["response_mask"] == shard["loss_masks"][place].tolist()
        assert row["reward"] == shard["raw_reward"][int(row["sample_id"])]
        assert row["group_id"] == str(3 * row["step"] + min(int(row["sample_id"]) // 4, 2))
        assert row["trajectory_id"] == shard["rollout_ids"][place]
        apart = torch.tensor(row["policy_log_probs"]) - torch.tensor(row["old_log_probs"])
        assert 0 < float(apart.abs().max()) < 0.1
    assert {row["optim_step_id"] for row in rows} == {0, 1}


@pytest.mark.slow
def test_its_advantages_are_right_without_any_option(dump):
    report = findings(dump)
    assert not [found.code for found in report.findings if found.severity.label == "error"]
    assert {(found.code, found.verdict) for found in report.findings if found.code == "RDA001"} == {
        ("RDA001", "confirmed")
    }


@pytest.mark.slow
def test_a_run_of_another_estimator_gives_no_error_without_options(dump):
    def as_rewards(body):
        columns = body["rollout_data"]
        for row, index in enumerate(columns["sample_indices"]):
            raw = columns["raw_reward"][index % 13]
            columns["advantages"][row] = torch.full_like(columns["advantages"][row], raw)

    for file in (dump / "train_data").iterdir():
        edited(file, as_rewards)
    assert "RDA004" not in [found.code for found in findings(dump).findings if found.verdict == "confirmed"]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["samples"][0].update(advantages=torch.zeros(9)),
        lambda body: body.update(samples=body["samples"][:1]),
        lambda body: body.update(samples=None),
        lambda body: body.update(samples=[1] * len(body["samples"])),
    ],
)
def test_another_micro_batch_gives_no_log_probs_at_the_loss(tmp_path, dump, change):
    edited(dump / "policy_loss_debug" / "rank_0_call_0.pt", change)
    rows, _ = rows_of(tmp_path, dump)
    left = {(row["step"], row["rank"]) for row in rows if row["policy_log_probs"] is None}
    assert left == {(0, 0)}


def test_a_resumed_run_has_no_log_probs_at_the_loss(tmp_path, dump):
    (dump / "policy_loss_debug" / "rank_0_call_0.pt").unlink()
    rows, sink = rows_of(tmp_path, dump)
    assert "5 files of rank 0 for 6 micro-batches" in " ".join(sink.notes)
    assert all(row["policy_log_probs"] is None for row in rows if row["rank"] == 0)


def test_a_rollout_of_which_samples_were_dropped_is_left_out(tmp_path, dump):
    def drop(body):
        columns = body["rollout_data"]
        for name, column in columns.items():
            if isinstance(column, list) and len(column) == len(columns["tokens"]) and name != "tokens":
                columns[name] = column[:-1]
        columns["tokens"] = columns["tokens"][:-1]

    edited(dump / "train_data" / "0_1.pt", drop)
    rows, sink = rows_of(tmp_path, dump)
    assert {row["step"] for row in rows} == {1}
    assert "rollout 0: not every sample was trained on" in " ".join(sink.notes)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda body: body.pop("qkv_format"), InputError, "another trainer"),
        (lambda body: body.update(cp_size=2), InputError, "slices of rows"),
        (lambda body: body.update(cp_size=torch.zeros(2)), DataError, "cp_size is tensor"),
        (lambda body: body["rollout_data"].pop("sample_indices"), InputError, "cannot be told apart"),
        (lambda body: body["rollout_data"].update(sample_indices=["a"]), DataError, "sample_indices is 'a'"),
        (lambda body: body.update(rank=None), DataError, "rank of train data"),
        (lambda body: body["rollout_data"].update(micro_batch_indices=7), None, ""),
        (lambda body: body["rollout_data"].update(micro_batch_indices=[7] * 3), None, ""),
    ],
)
def test_what_is_hostile_or_not_joined_is_named(tmp_path, dump, change, error, match):
    edited(dump / "train_data" / "0_0.pt", change)
    if error is None:
        assert len(rows_of(tmp_path, dump)[0]) == 26
        return
    with pytest.raises(error, match=match):
        rows_of(tmp_path, dump)
