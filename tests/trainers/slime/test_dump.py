"""slime: dumps that its own functions wrote, the documented layout, and what must not be run or believed."""

import pickle
import shutil
import zipfile

import pytest
import torch
from importers.importing import DATA, converted, findings, slime_dump

import rolloutdoctor as rd
from rolloutdoctor.results.errors import DataError, InputError, RolloutDoctorError
from rolloutdoctor.trainers.slime.dump_gaps import GroupNumbers


def test_the_join(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", slime_dump(tmp_path / "dump"))
    assert len(rows) == 12
    row = next(row for row in rows if (row["step"], row["sample_id"]) == (1, "4"))
    assert row["group_id"] == "11"
    assert row["reward"] == 0.0  # the rollout's, not the normalised one, nor what metadata put over it
    assert row["response_ids"] == [10, 11, 12]
    assert row["prompt_ids"] == [7, 8, 9]
    assert row["rank"] == 0
    assert row["old_log_probs"] == pytest.approx([each + 0.01 for each in row["rollout_log_probs"]])
    # The groups of its two rollouts are 0, 1, 10 and 11.
    (note,) = sink.notes
    assert note.startswith("8 of the 10 groups numbered before the last rollout are in none of them")


@pytest.mark.parametrize(
    ("rollouts", "missing"),
    [
        ({0: [0, 1], 1: [2, 3], 2: [4, 5]}, None),
        ({0: [0, 1], 1: [3, 4], 2: [5, 6]}, "1 of the 5 groups"),
        # What a fully-async rollout completes late comes late.
        ({0: [0, 3], 1: [1, 2], 2: [4, 7]}, None),
        ({0: [0, 1], 1: [4, 5], 2: [2, 9]}, None),
        # Of a part of a run, and of one whose rollout is not there, or whose groups have names, nothing is said.
        ({7: [40, 41], 8: [42, 43]}, None),
        ({7: [40, 41], 8: [43, 44], 9: [45]}, "1 of the 5 groups"),
        ({0: [0, 1], 2: [4, 5]}, None),
        ({0: ["a", "b"], 1: ["d"]}, None),
        ({0: [0, 1], 1: []}, None),
        ({0: [3, 4]}, None),
        ({}, None),
    ],
)
def test_numbers_that_are_in_no_rollout(rollouts, missing):
    numbers = GroupNumbers()
    for rollout, groups in rollouts.items():
        numbers.add(rollout, [str(group) for group in groups])
    note = numbers.note()
    assert (note is None) == (missing is None)
    assert note is None or note.startswith(missing)


@pytest.mark.slow
def test_a_removed_sample_keeps_its_mask_from_before(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", slime_dump(tmp_path / "dump"))
    removed = [row for row in rows if row["sample_id"] == "2"]
    assert all(not any(row["response_mask"]) and all(row["response_mask_pre"]) for row in removed)
    # Whether such rows are in a baseline follows from an option that the dump does not state.
    assert "RDA001" in {one.code for one in findings(tmp_path / "dump").skipped}
    stated = rd.check(tmp_path / "dump", options={"advantage_estimator": "grpo"})
    assert "RDA001" in [found.code for found in stated.findings]


def test_rows_of_one_rollout_are_one_trajectory(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", slime_dump(tmp_path / "dump", train={"rollout_ids": 7}))
    assert {row["trajectory_id"] for row in rows} == {7}
    dump = slime_dump(tmp_path / "other", train={"rollout_ids": "7"})
    with pytest.raises(DataError, match="rollout_ids is '7' where an integer of 0 or more was expected"):
        converted(tmp_path / "run.parquet", dump)


def test_rollouts_alone(tmp_path):
    dump = slime_dump(tmp_path / "dump")
    rows, _ = converted(tmp_path / "run.parquet", dump / "rollout_data")
    assert {row["group_id"] for row in rows} == {"0", "1", "10", "11"}
    assert not any(next(row for row in rows if row["sample_id"] == "2")["response_mask"])
    assert "old_log_probs" not in rows[0]


def test_train_data_alone_has_no_groups(tmp_path):
    dump = slime_dump(tmp_path / "dump")
    rows, sink = converted(tmp_path / "run.parquet", dump / "train_data")
    assert "group_id" not in rows[0]
    assert rows[0]["reward"] == 8.0
    assert "--save-debug-rollout-data" in sink.notes[0]


def test_rewards_by_name(tmp_path):
    dump = slime_dump(tmp_path / "dump", rollout={"reward": {"acc": 1.0, "format": 0.5}})
    rows, _ = converted(tmp_path / "run.parquet", dump, columns={"reward": "format"})
    assert {row["reward"] for row in rows} == {0.5}
    with pytest.raises(DataError, match="no reward 'acd'; it has acc, format"):
        converted(tmp_path / "run.parquet", dump, columns={"reward": "acd"})
    with pytest.raises(DataError, match="several rewards; say which one"):
        converted(tmp_path / "run.parquet", dump / "rollout_data")


@pytest.mark.parametrize(
    ("train", "rollout", "message"),
    [
        ({"log_probs": torch.zeros(9)}, {}, "old_log_probs has 9 values for a response of"),
        ({"log_probs": torch.zeros(1, 2)}, {}, "log_probs is not one number for each token"),
        ({"log_probs": ["a"]}, {}, "log_probs is not one number for each token"),
        ({"rollout_position": 99}, {}, "rollout_position 99 is not in the rollout data"),
        ({"response_lengths": 10**6}, {}, "a response of 1000000 tokens in a sample of"),
        ({"response_lengths": True}, {}, "response length is True"),
        ({"response_lengths": 10**18, "tokens": None}, {"tokens": None}, "more than any response has"),
        ({"tokens": [10**20]}, {}, "tokens holds a number that is too large"),
        ({"loss_masks": torch.tensor([1.0, 0.5, 1.0])}, {}, "loss_masks holds numbers that are no uint8"),
        ({"loss_masks": torch.tensor([1, 256, 1])}, {}, "loss_masks holds numbers that are no uint8"),
        ({}, {"group_index": None}, "no group_index"),
        ({}, {"reward": "high"}, "the reward is 'high' where a number was expected"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, train, rollout, message):
    with pytest.raises(DataError, match=message):
        converted(tmp_path / "run.parquet", slime_dump(tmp_path / "dump", train=train, rollout=rollout))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump"]


def test_another_format_version(tmp_path):
    torch.save({"format_version": 3, "rollout_id": 0, "samples": [{}]}, tmp_path / "0.pt")
    with pytest.raises(InputError, match="format version 3"):
        converted(tmp_path / "run.parquet", tmp_path / "0.pt")


class Touch:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_no_pickle_is_run_without_the_flag(tmp_path):
    mark = tmp_path / "mark"
    dump = slime_dump(tmp_path / "dump", rollouts=(0,))
    samples = torch.load(dump / "rollout_data" / "0.pt", weights_only=True)["samples"]
    torch.save({"rollout_id": 0, "samples": samples, "extra": Touch(mark)}, dump / "rollout_data" / "0.pt")
    with pytest.raises(InputError, match=r"rollout_data/0\.pt: loading it needs the class .*--allow-pickle"):
        converted(tmp_path / "run.parquet", dump)
    assert not mark.exists()


class Harmless:
    pass


def test_allow_pickle(tmp_path):
    dump = slime_dump(tmp_path / "dump", rollouts=(0,), rollout={"metadata": {"when": complex(1, 2)}})
    samples = torch.load(dump / "rollout_data" / "0.pt", weights_only=False)["samples"]
    torch.save({"rollout_id": 0, "samples": samples, "x": pickle.PicklingError("x")}, dump / "rollout_data" / "0.pt")
    with pytest.raises(InputError, match="--allow-pickle"):
        converted(tmp_path / "run.parquet", dump)
    rows, _ = converted(tmp_path / "run.parquet", dump, allow_pickle=True)
    assert len(rows) == 6


def test_a_compressed_archive_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "0.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**7)
    with pytest.raises(InputError, match="a compressed archive"):
        converted(tmp_path / "run.parquet", tmp_path / "0.pt")


def test_a_view_that_declares_more_than_it_holds(tmp_path):
    huge = torch.zeros(1).expand(10**12)
    dump = slime_dump(tmp_path / "dump", rollouts=(0,), train={"log_probs": huge})
    with pytest.raises(DataError, match="log_probs has 1000000000000 values"):
        converted(tmp_path / "run.parquet", dump)


def test_a_truncated_archive(tmp_path):
    dump = slime_dump(tmp_path / "dump", rollouts=(0,))
    path = dump / "train_data" / "0.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="truncated or damaged"):
        converted(tmp_path / "run.parquet", dump)


REAL = DATA / "slime"


def train_file(rollout=0):
    return torch.load(REAL / "train_data" / f"{rollout}.pt", weights_only=True)


@pytest.mark.slow
def test_a_dump_of_slimes_own_functions(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", REAL)
    assert list(sink.notes) == ["1 evaluation files (eval_*.pt) carry no group and are left out"]
    assert len(rows) == 24
    for row in rows:
        sample = train_file(row["step"])["samples"][int(row["sample_id"])]
        length = sample["response_lengths"]
        assert row["response_ids"] == sample["tokens"].tolist()[-length:]
        assert row["old_log_probs"] == sample["log_probs"].tolist()
        assert row["ref_log_probs"] == sample["ref_log_probs"].tolist()
        assert row["reward"] == train_file(row["step"])["raw_reward"][int(row["sample_id"])]
        assert row["group_id"] == str(3 * row["step"] + int(row["sample_id"]) // 4)


def test_how_the_rollout_was_cut(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", REAL)
    for row in rows:
        shard = train_file(row["step"])["dp_shards"][row["rank"]]
        local = shard["partition"].index(int(row["sample_id"]))
        number = next(number for number, each in enumerate(shard["micro_batch_indices"]) if local in each)
        first = shard["num_microbatches"][0]
        assert (row["optim_step_id"], row["micro_batch_id"]) == (number >= first, number % first)
    cells = {(row["step"], row["optim_step_id"], row["rank"], row["micro_batch_id"]) for row in rows}
    assert len(cells) == 2 * 2 * 2 * 3


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    "change",
    [
        lambda shard: shard.update(partition=None),
        lambda shard: shard.update(num_microbatches=[3]),
        lambda shard: shard["micro_batch_indices"].pop(),
        lambda shard: shard["micro_batch_indices"][0].append(5),
        lambda shard: shard.update(micro_batch_indices=[[[0]]]),
        lambda shard: shard["partition"].__setitem__(0, 0),
        lambda shard: shard.update(num_microbatches=[10**12, 3]),
    ],
)
def test_a_cut_that_is_not_whole_is_left_out(tmp_path, change):
    shutil.copytree(REAL, tmp_path / "dump")
    body = train_file()
    change(body["dp_shards"][0])
    torch.save(body, tmp_path / "dump" / "train_data" / "0.pt")
    rows, sink = converted(tmp_path / "run.parquet", tmp_path / "dump")
    assert len(rows) == 24
    assert not {"optim_step_id", "micro_batch_id"} & set(rows[0])
    assert "the dp_shards of 1 train files do not say" in sink.notes[-1]


def laughs(depth=60):
    """Lists in lists: a hundred bytes of pickle that print as 2**60 of them."""
    inner = ["ha"]
    for _ in range(depth):
        inner = [inner, inner]
    return inner


@pytest.mark.parametrize("field", ["reward", "tokens", "loss_mask", "group_index", "status", "response_length"])
def test_what_prints_without_end_is_not_printed(tmp_path, field):
    dump = slime_dump(tmp_path / "dump", rollouts=(0,), rollout={field: laughs()})
    with pytest.raises((DataError, InputError)) as error:
        converted(tmp_path / "run.parquet", dump / "rollout_data")
    assert len(str(error.value)) < 400


def test_an_archive_whose_records_overlap(tmp_path):
    """Many names for one stretch of the file: what a zip bomb does without compression."""
    path = tmp_path / "0.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**6)
        record = archive.infolist()[0]
        for number in range(1000):
            again = zipfile.ZipInfo(f"archive/data/{number}")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(again, name, getattr(record, name))
            archive.filelist.append(again)
    assert path.stat().st_size < 2 * 10**6
    with pytest.raises(InputError, match=r"declares 1,001,000,000 bytes in a file of"):
        converted(tmp_path / "run.parquet", path)


ODD = {
    "complex": lambda: torch.zeros(3, dtype=torch.complex64),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "float8": lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "of one value without memory": lambda: torch.zeros(1, device="meta"),
    "of two axes": lambda: torch.zeros(2, 2),
    "with a gradient": lambda: torch.zeros(1, requires_grad=True),
    "bytes": lambda: b"ab",
    "object": lambda: {"a": [1]},
    "too large": lambda: 10**400,
    "lone surrogate": lambda: "\ud800",
}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_odd_values_anywhere(tmp_path, kind, odd):
    """Each field of a sample in turn: read, or refused in one sentence."""
    whole = slime_dump(tmp_path / "whole", rollouts=(0,))
    names = torch.load(whole / f"{kind}_data" / "0.pt", weights_only=True)["samples"][0]
    refused = []
    for name in names:
        dump = slime_dump(tmp_path / name, rollouts=(0,), **{kind: {name: ODD[odd]()}})
        try:
            converted(tmp_path / f"{name}.parquet", dump)
        except RolloutDoctorError as error:
            refused.append(str(error))
    assert refused
    assert not [words for words in refused if len(words.splitlines()) != 1]
