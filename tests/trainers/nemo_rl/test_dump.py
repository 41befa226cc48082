"""Training data that NeMo-RL's own logger wrote: padding, groups, the reward that belongs to the row, placeholders."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from importers.importing import DATA, converted

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.rows import entries_of
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import DataError, InputError, UsageError

NEMO = DATA / "nemo_rl"


def stored(name, step=1):
    return [json.loads(line) for line in (NEMO / name / f"train_data_step{step}.jsonl").read_text().splitlines()]


def edited(tmp_path, name="grpo", **fields):
    """One file of the dump, with fields of its second row replaced."""
    rows = stored(name)
    rows[1] |= fields
    path = tmp_path / "dump" / "train_data_step1.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_padding_is_cut_and_the_response_begins_where_training_does(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", NEMO / "grpo")
    assert not sink.notes
    assert len(rows) == 24
    for row, raw in zip(rows, stored("grpo") + stored("grpo", 2), strict=True):
        length, mask = raw["input_lengths"][0], raw["token_loss_mask"][0]
        start = mask.index(1.0)
        assert row["prompt_ids"] == raw["token_ids"][0][:start]
        assert row["response_ids"] == raw["token_ids"][0][start:length]
        assert row["old_log_probs"] == pytest.approx(raw["prev_logprobs"][0][start:length])
        assert row["rollout_log_probs"] == pytest.approx(raw["generation_logprobs"][0][start:length])
        assert row["advantages"] == pytest.approx(raw["advantages"][0][start:length])
        assert row["reward"] == raw["rewards"][0]


def test_the_step_is_in_the_file_name(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", NEMO / "grpo")
    assert Counter(row["step"] for row in rows) == {1: 12, 2: 12}
    shutil.copy(NEMO / "grpo" / "train_data_step1.jsonl", tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="the step is in the name"):
        converted(tmp_path / "run.parquet", tmp_path / "other.jsonl", importer="nemo-rl")


def test_rows_of_one_prompt_are_a_group(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", NEMO / "grpo")
    groups = Counter((row["step"], row["group_id"], tuple(row["prompt_ids"])) for row in rows)
    assert set(groups.values()) == {4}
    assert len(groups) == 6


def test_a_rejected_sample_keeps_its_mask_from_before(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", NEMO / "grpo")
    rejected = [row for row in rows if row["sample_id"] in ("1-1", "2-1")]
    assert all(not any(row["response_mask"]) and all(row["response_mask_pre"]) for row in rejected)
    assert all(row["response_mask"] == row["response_mask_pre"] for row in rows if row not in rejected)


def test_dynamic_sampling_rewards_are_the_filtered_ones(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", NEMO / "dynamic")
    raw = stored("dynamic") + stored("dynamic", 2)
    assert {row["rewards"][0] for row in raw} == {9.0}
    assert [row["reward"] for row in rows] == [row["filtered_rewards"][0] for row in raw]


def test_lines_beyond_the_filtered_batch_are_no_rows(tmp_path):
    assert len(stored("dynamic_sync")) == 16
    rows, _ = converted(tmp_path / "run.parquet", NEMO / "dynamic_sync")
    assert [row["sample_id"] for row in rows] == [f"1-{row}" for row in range(12)]


def test_zeros_in_the_place_of_log_probs_are_left_out(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", NEMO / "on_policy")
    assert "old_log_probs" not in rows[0]
    assert "force_on_policy_ratio" in sink.notes[0]
    mixed = tmp_path / "mixed"
    shutil.copytree(NEMO / "grpo", mixed)
    shutil.copy(NEMO / "on_policy" / "train_data_step2.jsonl", mixed)
    with pytest.raises(DataError, match=r"train_data_step2\.jsonl: prev_logprobs are zeros here"):
        converted(tmp_path / "run2.parquet", mixed)


def test_what_was_not_sampled_has_no_sampler_log_prob(tmp_path):
    raw = stored("grpo")[1]
    row = next(index for index, length in enumerate(raw["token_loss_mask"][0]) if length)
    mask = [[*raw["token_loss_mask"][0]]]
    mask[0][row + 1] = 0.0  # a token of a tool between two turns
    rows, _ = converted(tmp_path / "run.parquet", edited(tmp_path, token_loss_mask=mask))
    assert np.isnan(rows[1]["rollout_log_probs"]).tolist()[:3] == [False, True, False]
    assert rows[1]["response_mask_pre"][:3] == [1, 0, 1]


def test_nan_as_json_writes_it(tmp_path):
    raw = stored("grpo")[1]
    lengths = len(raw["generation_logprobs"][0])
    path = edited(tmp_path, generation_logprobs=[[float("nan")] * lengths], rewards=[float("nan")])
    assert "NaN" in path.read_text()
    rows, _ = converted(tmp_path / "run.parquet", path)
    assert np.isnan(rows[1]["rollout_log_probs"]).all()
    assert rows[1]["reward"] is None or np.isnan(rows[1]["reward"])


def test_files_before_v06_and_of_distillation_are_refused(tmp_path):
    path = tmp_path / "train_data_step1.jsonl"
    row = {"content": ["a"], "rewards": [1.0], "generation_logprobs": [[0.0]], "prev_logprobs": [[0.0]]}
    path.write_text(json.dumps(row | {"input_lengths": [1], "idx": 0}) + "\n")
    with pytest.raises(InputError, match=r"line 1: no sample_loss_mask; NeMo-RL writes .* since v0\.6"):
        converted(tmp_path / "run.parquet", path)
    path.write_text('{"content": ["a"], "input_lengths": [1], "idx": 0}\n')
    with pytest.raises(InputError, match="no sample_loss_mask"):
        converted(tmp_path / "run.parquet", path, importer="nemo-rl")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_lengths": [99]}, "input_lengths is 99 for a sequence of"),
        ({"input_lengths": [-1]}, "input_lengths is -1 where an integer"),
        ({"input_lengths": 3}, "input_lengths is 3 where a list of one"),
        ({"prev_logprobs": [[0.5]]}, "old_log_probs has 1 values for a sequence of"),
        ({"token_loss_mask": [[0.5]]}, "token_loss_mask holds something that is neither 0 nor 1"),
        ({"sample_loss_mask": [0.5]}, "sample_loss_mask is 0.5 where 0 or 1"),
        ({"token_ids": [["a"]]}, "token_ids holds something that is not an integer"),
        ({"rewards": ["high"]}, "rewards is 'high' where a number"),
        ({"idx": None}, "idx is None where an integer"),
    ],
)
def test_a_wrong_field_names_its_line(tmp_path, fields, message):
    path = edited(tmp_path, **fields)
    with pytest.raises(DataError, match=f"line 2: {message}"):
        converted(tmp_path / "run.parquet", path)
    assert [each.name for each in tmp_path.iterdir()] == ["dump"]


def test_two_runs_and_maps_are_refused(tmp_path):
    with pytest.raises(InputError, match="are both step 1; give one run at a time"):
        converted(tmp_path / "run.parquet", NEMO / "grpo", NEMO / "dynamic")
    with pytest.raises(UsageError, match="nothing can be mapped there"):
        converted(tmp_path / "run.parquet", NEMO / "grpo", importer="nemo-rl", columns={"reward": "x"})


def test_the_trainer_and_what_the_fields_show_of_its_options(tmp_path):
    for name, options in {
        "grpo": {},
        "dynamic": {"grpo.use_dynamic_sampling": True},
        "on_policy": {"loss_fn.force_on_policy_ratio": True},
    }.items():
        converted(tmp_path / f"{name}.parquet", NEMO / name)
        metadata = open_run([str(tmp_path / f"{name}.parquet")]).metadata
        assert (metadata.trainer, dict(metadata.config)) == ("nemo-rl", options)


def test_a_dump_of_ppo_names_no_trainer(tmp_path):
    """Its advantages are 0 wherever nothing is trained."""
    rows = stored("grpo")
    for row in rows:
        row["advantages"] = [(np.array(row["advantages"][0]) * row["token_loss_mask"][0]).tolist()]
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    converted(tmp_path / "run.parquet", path)
    assert open_run([str(tmp_path / "run.parquet")]).metadata.trainer is None


def test_log_probs_of_the_reference_model_that_a_user_adds(tmp_path):
    raw = stored("grpo")
    path = tmp_path / "train_data_step1.jsonl"
    added = [row | {"reference_policy_logprobs": row["prev_logprobs"]} for row in raw]
    path.write_text("".join(json.dumps(row) + "\n" for row in added))
    rows, _ = converted(tmp_path / "run.parquet", path)
    assert rows[0]["ref_log_probs"] == rows[0]["old_log_probs"]


def test_its_log_keeps_the_prefix_of_its_names():
    """`train/reward` is a name of the transformers Trainer, too, whose own names have none."""
    row = {"step": 3, "train/loss": 0.5, "train/reward": 0.25, "train/kl_penalty": 0.1}
    ((step, _, values),) = entries_of(row, "line 1", LogNotes())
    assert (step, values) == (3, {name: value for name, value in row.items() if name != "step"})
    assert next(entries_of({"step": 3, "train/loss": 0.5, "train/reward": 0.25}, "line 1", LogNotes()))[2].keys() == {
        "loss",
        "reward",
    }
