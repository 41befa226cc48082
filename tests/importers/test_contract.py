"""What every importer keeps to: a dump says what the run file made of it says, and a torn last line is left out."""

import pytest
from importers.importing import DATA, converted, findings, findings_of_run, slime_dump

DUMPS = {
    "ms-swift": ["ms_swift"],
    "miles": ["miles"],
    "nemo-gym": ["nemo_gym/rollouts.jsonl"],
    "nemo-rl": ["nemo_rl/grpo"],
    "areal": ["areal/rollout"],
    "open-instruct": ["open_instruct"],
    "prime-rl-tokens": ["prime_rl/token_exports"],
    "prime-rl-traces": ["prime_rl/rollouts"],
    "rllm": ["rllm/episodes"],
    "skyrl": ["skyrl"],
    "slime": ["slime"],
    "tinker-cookbook": ["tinker_cookbook"],
    "trl": ["trl/mixed"],
    "trl, overwritten": ["trl/overwritten"],
    "verifiers": ["verifiers/0a1b2c3d"],
    "verifiers-traces": ["verifiers_traces/0a1b2c3d"],
    "verl": ["verl/v1", "verl/file_logger.jsonl"],
    "verl, v0": ["verl/v0", "verl/file_logger.jsonl"],
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dump", DUMPS)
def test_round_trip(tmp_path, dump):
    sources = [DATA / name for name in DUMPS[dump]]
    converted(tmp_path / "run.parquet", *sources)
    direct = findings(*sources)
    assert direct == findings_of_run(tmp_path / "run.parquet")
    assert any(found.code == "RDI002" for found in direct.findings) == dump.startswith(("trl", "open-instruct"))


@pytest.mark.slow
def test_round_trip_of_the_layout_that_slime_documents(tmp_path):
    dump = slime_dump(tmp_path / "dump")
    converted(tmp_path / "run.parquet", dump)
    assert findings(dump) == findings_of_run(tmp_path / "run.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "areal/rollout/1/4.jsonl",
        "nemo_gym/rollouts.jsonl",
        "nemo_rl/grpo/train_data_step1.jsonl",
        "open_instruct/run_rollouts_000000.jsonl",
        "prime_rl/token_exports/step_1/rank_0.jsonl",
        "prime_rl/rollouts/step_1/train/effective/traces.jsonl",
        "tinker_cookbook/iteration_000001/train_rollout_summaries.jsonl",
        "verl/v1/1.jsonl",
    ],
)
def test_a_torn_last_line_is_left_out_and_counted(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text((DATA / name).read_text()[:-30])
    before, _ = converted(tmp_path / "before.parquet", DATA / name)
    rows, sink = converted(tmp_path / "run.parquet", path)
    assert len(rows) == len(before) - 1
    assert f"{path}: the last line was not written to its end, and is left out" in sink.notes
    (found,) = (found for found in findings(path).findings if found.code == "RDI002")
    assert found.measures["torn_lines"].value == 1
