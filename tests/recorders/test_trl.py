"""The recorder against the real GRPOTrainer: what it wrote gives TRL's loss, KL and advantages."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from recorders.trl_runs import check_reproduces, make_trainer, rarely, read, run, sometimes, steps_of

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.recorders.trl import record

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_logged_values_follow_from_the_rows(tmp_path, loss_type):
    trainer, rows, logged = run(tmp_path, loss_type=loss_type, evaluate=loss_type in ("dapo", "grpo"))
    check_reproduces(tmp_path)
    train = [row for row in rows if row["split"] == "train"]
    assert [(row["step"], row["group_id"]) for row in train] == [
        (step, f"{step - 1}/{group}") for step in (1, 2, 3) for group in (0, 1) for _ in range(4)
    ]
    assert {row["micro_batch_id"] for row in train} == {0, 1}
    assert {row["optim_step_id"] for row in train} == {0}
    assert "old_log_probs" not in train[0]
    assert all(len(row["entropy"]) == len(row["response_ids"]) for row in rows)
    for row in rows:
        ends = row["response_ids"][-1] <= 1
        assert row["status"] == ("stop" if ends else "length")
        assert row["rewards"] == {"digits": row["reward"]}
    if trainer.args.eval_strategy == "steps":
        evals = [row for row in rows if row["split"] == "eval"]
        assert {row["step"] for row in evals} == {2, 3}
        assert [row["group_id"] for row in evals[:4]] == ["eval-0/0", "eval-0/0", "eval-0/1", "eval-0/1"]
        assert sorted({row["micro_batch_id"] for row in evals}) == [0, 1, 2]
        assert "runtime" in logged[2, "eval"]
        assert "eval_kl" not in logged[2, "eval"]
    assert logged[3, "train"]["train_runtime"] > 0


@pytest.mark.slow
def test_several_iterations(tmp_path):
    _, rows, _ = run(tmp_path, num_iterations=2, steps=4)
    check_reproduces(tmp_path)
    steps = steps_of(rows)
    assert [len(steps[step, "train"]) for step in (1, 2, 3, 4)] == [8] * 4
    first, second = ({row["sample_id"]: row for row in steps[step, "train"]} for step in (1, 2))
    assert first.keys() == second.keys()
    key = next(iter(first))
    np.testing.assert_array_equal(first[key]["old_log_probs"], second[key]["old_log_probs"])
    assert (first[key]["policy_log_probs"] != second[key]["policy_log_probs"]).any()


@pytest.mark.slow
def test_several_optimizer_steps_from_one_generated_batch(tmp_path):
    _, rows, _ = run(tmp_path, steps_per_generation=4, steps=4)
    check_reproduces(tmp_path)
    steps = steps_of(rows)
    assert sorted(steps) == [(1, "train"), (3, "train")]
    assert {row["optim_step_id"] for row in steps[3, "train"]} == {0, 1}
    assert {row["micro_batch_id"] for row in steps[3, "train"]} == {0, 1, 2, 3}


@pytest.mark.slow
def test_several_generated_batches_in_one_optimizer_step(tmp_path):
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "num_iterations": 2, "steps": 2}
    _, rows, _ = run(tmp_path, loss_type="grpo", **options)
    check_reproduces(tmp_path)
    step = steps_of(rows)[1, "train"]
    assert [row["group_id"] for row in step[::4]] == ["0/0", "0+1/0", "1/0", "1+1/0"]
    assert [row["micro_batch_id"] for row in step[::4]] == [0, 1, 2, 3]


def test_a_batch_that_training_did_not_finish_is_left_out(tmp_path):
    trainer = make_trainer(tmp_path, steps_per_generation=4, steps=3)
    record(trainer, tmp_path / "run.parquet")
    with pytest.warns(RuntimeWarning, match="left step 3 out of"):
        trainer.train()
    assert {row["step"] for row in read(tmp_path)[0]} == {1}


@pytest.mark.slow
def test_truncated_rows_keep_their_tokens(tmp_path):
    _, rows, _ = run(tmp_path, mask_truncated_completions=True, max_completion_length=5, evaluate=True)
    check_reproduces(tmp_path)
    assert {row["status"] for row in rows} == {"stop", "length"}
    for row in rows:
        assert row["response_mask_pre"].all()
        assert row["response_mask"].all() == (row["status"] == "stop")
        assert row["response_mask"].any() == (row["status"] == "stop")
        assert len(row["response_ids"]) == len(row["policy_log_probs"]) > 0


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_sampler_log_probs_and_tool_tokens(tmp_path, mode):
    """A custom rollout stands in for an inference engine: TRL then corrects for its log-probs as it would for one."""
    from types import SimpleNamespace

    made = {}

    def rollout(prompts, trainer):
        generator = np.random.default_rng(len(made))
        output = {"prompt_ids": trainer.processing_class(text=prompts)["input_ids"]}
        output["completion_ids"] = [
            [*generator.integers(2, 12, size).tolist()] for size in (1 + i % 5 for i in range(8))
        ]
        for ids in output["completion_ids"][::2]:
            ids.append(1)
        output["logprobs"] = [(-generator.random(len(ids)) * 5).tolist() for ids in output["completion_ids"]]
        output["logprobs"][3][0] = None
        output["env_mask"] = [[i % 3 != 1 for i, _ in enumerate(ids)] for ids in output["completion_ids"]]
        made[trainer.state.global_step + 1] = output
        return output

    trainer = make_trainer(tmp_path, mask_truncated_completions=True, rollout_func=rollout, steps=2)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.vllm_importance_sampling_mode = mode
    record(trainer, tmp_path / "run.parquet")
    trainer.train()
    rows, _ = read(tmp_path)
    check_reproduces(tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode)
    for step, batch in steps_of(rows).items():
        output = made[step[0]]
        for row, ids, logps, mask in zip(
            batch, output["completion_ids"], output["logprobs"], output["env_mask"], strict=True
        ):
            assert row["response_ids"].tolist() == ids
            assert row["response_mask_pre"].tolist() == mask
            assert row["response_mask"].tolist() == [kept and ids[-1] == 1 for kept in mask]
            expected = np.array([np.nan if logp is None else logp for logp in logps], np.float32)
            np.testing.assert_array_equal(row["rollout_log_probs"], expected)
            assert len(row["is_weights"]) == len(ids)
            if mode == "sequence_mask":
                assert len(set(row["is_weights"].tolist())) == 1
    assert np.isnan(rows[3]["rollout_log_probs"][0])


@pytest.mark.slow
def test_weighted_rewards_that_are_missing_at_times(tmp_path):
    options = {"reward_weights": [0.5, 2.0], "num_generations_eval": 1, "evaluate": True, "steps": 4}
    _, rows, _ = run(tmp_path, rewards=(sometimes, rarely), **options)
    check_reproduces(tmp_path)
    assert {row["rewards"]["sometimes"] for row in rows} == {0.0, 1.0, None}
    unscored = [row for row in rows if row["reward"] is None]
    assert unscored
    assert all(set(row["rewards"].values()) == {None} and row["advantage"] == 0 for row in unscored)
    for row in rows:
        if row["reward"] is not None:
            parts = row["rewards"]
            assert row["reward"] == 0.5 * (parts["sometimes"] or 0) + 2.0 * (parts["rarely"] or 0)
    evals = [row for row in rows if row["split"] == "eval"]
    assert len({row["group_id"] for row in evals if row["step"] == 2}) == 6
    assert RunMetadata.decode(pq.read_schema(tmp_path / "run.parquet").metadata, "").config["num_generations_eval"] == 1
