import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from engine.runs import TRL, VERL, random_columns, small, write

from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.commands.diff.sides import DiffOptions
from rolloutdoctor.commands.export.tokens import RecomputeOptions, recompute
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.options import Layer

SCALED = TRL | {"config": TRL["config"] | {"scale_rewards": "group"}}


def recomputed(path, out=None, **options):
    fixes = tuple(choose(text) for text in options.pop("fixes", []))
    result = recompute(open_run([path]), RecomputeOptions(device="cpu", fixes=fixes, **options), out)
    return result, None if out is None else pq.read_table(out).to_pydict()


def flat(cells):
    return np.array([value for row in cells for value in row])


def test_written_numbers(tmp_path):
    """Rewards less the mean of the group; k3 of -0.5; four trained tokens in all."""
    result, rows = recomputed(write(tmp_path / "run.parquet", small()), tmp_path / "out.parquet", fixes=["zero-std"])
    kl, slope = math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)
    assert list(rows)[:4] == ["step", "split", "group_id", "sample_id"]
    assert rows["sample_id"] == ["1", "2", "3", "4"]
    assert rows["advantages_re"] == [[0.5, 0.5], [-0.5, 0.0], [0.0], []]
    assert rows["ratio_re"] == [[1.0, 1.0], [1.0, 0.0], [1.0], []]
    assert flat(rows["kl_re"]) == pytest.approx([kl, kl, kl, 0, kl], rel=1e-12)
    assert flat(rows["loss_re"]) == pytest.approx(
        np.array([-0.5, -0.5, 0.5, 0, 0]) / 4 + kl / 8 * np.array([1, 1, 1, 0, 1])
    )
    assert flat(rows["grad_re"]) == pytest.approx(
        np.array([-0.5, -0.5, 0.5, 0, 0]) / 4 + slope / 8 * np.array([1, 1, 1, 0, 1])
    )
    # The second group has equal rewards: with the fix its row has no KL term, and the others are as before.
    assert rows["loss_re_fixed"][2] == [0.0]
    assert rows["grad_re_fixed"][2] == [0.0]
    assert rows["grad_re_fixed"][:2] == rows["grad_re"][:2]
    (step,) = result.steps
    assert step.before.loss == pytest.approx(flat(rows["loss_re"]).sum(), rel=1e-12)
    assert step.before.kl_loss == pytest.approx(kl / 2)
    assert step.before.policy_loss == pytest.approx(-0.125)
    assert step.before.grad_l1 == pytest.approx(np.abs(flat(rows["grad_re"])).sum())
    assert step.before.grad_l2 == pytest.approx(np.linalg.norm(flat(rows["grad_re"])))
    assert step.before.metrics["kl"] == pytest.approx(kl)
    assert step.fixed.kl_loss == pytest.approx(kl * 3 / 8)


@pytest.mark.parametrize("metadata", [TRL, VERL], ids=["trl", "verl"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_token_losses_sum_to_the_loss_of_the_step(tmp_path, metadata, dtype):
    path = write(tmp_path / "run.parquet", random_columns(1), metadata, row_group_size=7)
    result, rows = recomputed(path, tmp_path / "out.parquet", dtype=dtype)
    assert [step.step for step in result.steps] == [0, 1, 2]
    tolerance = {"float32": 1e-6, "float64": 1e-12}[dtype]
    for step in result.steps:
        here = [row for row, number in enumerate(rows["step"]) if number == step.step]
        losses = flat([rows["loss_re"][row] for row in here])
        assert abs(losses.sum() - step.before.loss) <= tolerance * np.abs(losses).sum()
        gradient = flat([rows["grad_re"][row] for row in here])
        assert np.abs(gradient).sum() == pytest.approx(step.before.grad_l1, rel=tolerance)


def test_the_gradient_is_the_slope_of_the_loss(tmp_path):
    columns = random_columns(2, steps=1)
    columns["policy_log_probs"] = [row.astype("float64") for row in columns["policy_log_probs"]]
    _, rows = recomputed(write(tmp_path / "run.parquet", columns), tmp_path / "out.parquet")
    row = next(i for i, mask in enumerate(columns["response_mask"]) if mask.sum() > 2)
    width, losses = 1e-6, []
    for sign in (1, -1):
        moved = [cells.copy() for cells in columns["policy_log_probs"]]
        moved[row][1] += sign * width
        result, _ = recomputed(write(tmp_path / "moved.parquet", columns | {"policy_log_probs": moved}))
        losses.append(result.steps[0].before.loss)
    assert rows["grad_re"][row][1] == pytest.approx((losses[0] - losses[1]) / (2 * width), rel=1e-6)


def test_masked_tokens_are_zero_whatever_they_hold(tmp_path):
    columns = random_columns(3)
    for name in ("policy_log_probs", "old_log_probs", "ref_log_probs"):
        columns[name] = [
            np.where(mask == 1, cells, np.nan).astype("float32")
            for mask, cells in zip(columns["response_mask"], columns[name], strict=True)
        ]
    columns["sum_pi_squared"] = columns["policy_log_probs"]
    result, rows = recomputed(write(tmp_path / "run.parquet", columns), tmp_path / "out.parquet", logits=True)
    masked = flat(columns["response_mask"]) == 0
    assert masked.any()
    for name in result.columns:
        assert (flat(rows[name])[masked] == 0).all(), name
        assert np.isfinite(flat(rows[name])).all(), name


def test_logits(tmp_path):
    columns = small(sum_pi_squared=[[0.3, 0.3], [0.3, 0.3], [0.3], []])
    _, rows = recomputed(write(tmp_path / "run.parquet", columns), tmp_path / "out.parquet", logits=True)
    factor = math.sqrt(1 - 2 * math.exp(-1) + np.float32(0.3))
    assert flat(rows["grad_logits_re"]) == pytest.approx(np.abs(flat(rows["grad_re"])) * factor)


def test_rows_and_files_may_come_in_any_order(tmp_path):
    columns = random_columns(4)
    count = len(columns["step"])
    _, rows = recomputed(write(tmp_path / "run.parquet", columns), tmp_path / "out.parquet")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "parts").mkdir()
    for part in range(3):
        write(tmp_path / "parts" / f"{part}.parquet", columns, rows=order[part::3], row_group_size=5)
    _, split = recomputed(tmp_path / "parts", tmp_path / "split.parquet")
    where = {key: row for row, key in enumerate(split["sample_id"])}
    for name in ("step", "group_id", "advantages_re", "loss_re", "grad_re"):
        moved = [split[name][where[key]] for key in rows["sample_id"]]
        if name in ("step", "group_id"):
            assert moved == rows[name]
        else:
            assert flat(moved) == pytest.approx(flat(rows[name]), rel=1e-9, abs=1e-15)


def test_identifiers_keep_their_type(tmp_path):
    path = write(tmp_path / "run.parquet", small(group_id=[7, 7, 8, 8], sample_id=[11, 12, 13, 14]))
    _, rows = recomputed(path, tmp_path / "out.parquet")
    assert (rows["group_id"], rows["sample_id"]) == ([7, 7, 8, 8], [11, 12, 13, 14])
    columns = small()
    del columns["sample_id"]
    _, rows = recomputed(write(tmp_path / "nameless.parquet", columns), tmp_path / "out.parquet")
    assert rows["sample_id"] == ["row 0", "row 1", "row 2", "row 3"]


def test_what_was_logged_stands_beside(tmp_path):
    path = write(tmp_path / "run.parquet", small(), logged=[(0, "kl", 0.25), (0, "unknown", 1.0)])
    result, _ = recomputed(path)
    assert result.steps[0].logged == {"kl": 0.25}


def test_without_log_probs_only_advantages(tmp_path):
    columns = small()
    del columns["policy_log_probs"], columns["ref_log_probs"]
    result, rows = recomputed(write(tmp_path / "run.parquet", columns), tmp_path / "out.parquet")
    assert rows["advantages_re"] == [[0.5, 0.5], [-0.5, 0.0], [0.0], []]
    assert rows["loss_re"] == [None] * 4
    assert result.steps[0].before.loss is None
    assert any("policy_log_probs" in note for note in result.notes)


def test_without_a_kl_term_there_is_no_kl(tmp_path):
    path = write(tmp_path / "run.parquet", small())
    result, rows = recomputed(path, tmp_path / "out.parquet", layers=[Layer("test", {"beta": 0})])
    assert rows["kl_re"] == [None] * 4
    assert rows["loss_re"][2] == [0.0]
    assert "kl_re is null: this configuration has no KL term" in result.notes


def test_the_penalty_in_the_reward_is_a_kl_too(tmp_path):
    metadata = {"trainer": "slime", "trainer_version": "0.3.1", "config": {"kl_coef": 0.1, "kl_loss_type": "k1"}}
    columns = small(values=[[0.0, 0.0], [0.0, 0.0], [0.0], []]) | {"old_log_probs": small()["policy_log_probs"]}
    columns = {name: values[:3] for name, values in columns.items()}
    metadata["config"]["advantage_estimator"] = "ppo"
    _, rows = recomputed(write(tmp_path / "run.parquet", columns, metadata), tmp_path / "out.parquet")
    assert rows["kl_re"] == [[0.5, 0.5], [0.5, 0.0], [0.5]]


@pytest.mark.parametrize(
    ("estimator", "why"),
    [
        ("ppo", "ppo adds the reward to the last token of a row, and 1 rows have no token; slime fails here"),
        ("reinforce_plus_plus", "reinforce_plus_plus needs a trained token in every row, and 1 rows have none; slime"),
    ],
)
def test_a_row_without_a_token_where_slime_needs_one(tmp_path, estimator, why):
    config = {"advantage_estimator": estimator, "normalize_advantages": True}
    columns = small(values=[[0.0, 0.0], [0.0, 0.0], [0.0], []])
    path = write(tmp_path / "run.parquet", columns, {"trainer": "slime", "trainer_version": "0.3.1", "config": config})
    result, rows = recomputed(path, tmp_path / "out.parquet")
    assert rows["advantages_re"] == [None] * 4
    assert result.steps[0].before.loss is None
    assert any(f"could not be computed and are null, the first is step 0: {why}" in note for note in result.notes)


def test_slime_logs_the_reference_wherever_it_is_in_the_file(tmp_path):
    """With neither a KL penalty nor a KL loss, too; masked tokens are left out."""
    metadata = {"trainer": "slime", "trainer_version": "0.3.1", "config": {"kl_coef": 0.0}}
    columns = small(ref_log_probs=[[-1.0, -2.0], [-3.0, 99.0], [-4.0], []])
    result, _ = recomputed(write(tmp_path / "run.parquet", columns, metadata))
    assert result.steps[0].before.metrics["rollout/ref_log_probs"] == pytest.approx((-1.5 - 3.0 - 4.0 + 0.0) / 4)
    del columns["ref_log_probs"]
    result, _ = recomputed(write(tmp_path / "less.parquet", columns, metadata))
    assert "rollout/ref_log_probs" not in result.steps[0].before.metrics


def test_steps_select(tmp_path):
    path = write(tmp_path / "run.parquet", random_columns(5))
    result, rows = recomputed(path, tmp_path / "out.parquet", steps=StepRange(1, 2))
    assert set(rows["step"]) == {1}
    assert [step.step for step in result.steps] == [1]
    result, rows = recomputed(path, tmp_path / "out.parquet", steps=StepRange(9, None))
    assert rows["step"] == []
    assert result.steps == ()


@pytest.mark.parametrize(
    ("drop", "options", "error", "words"),
    [
        (["response_mask"], {}, InputError, "without the column response_mask"),
        (["reward", "response_mask"], {}, InputError, "without the columns response_mask, reward"),
        ([], {"logits": True}, InputError, "needs the column sum_pi_squared"),
        ([], {"fixes": ["kl-inplace"]}, UsageError, "applies to slime"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, drop, options, error, words):
    columns = {name: cells for name, cells in small().items() if name not in drop}
    out = tmp_path / "out.parquet"
    with pytest.raises(error, match=words):
        recomputed(write(tmp_path / "run.parquet", columns), out, **options)
    assert not out.exists()


def test_a_run_is_never_written_over(tmp_path):
    path = write(tmp_path / "run.parquet", small())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is a file of the run itself"):
        recomputed(path, path)
    assert path.read_bytes() == before


def test_the_file_says_who_made_the_run(tmp_path):
    recomputed(write(tmp_path / "run.parquet", small()), tmp_path / "out.parquet")
    body = json.loads(pq.read_schema(tmp_path / "out.parquet").metadata[b"rolloutdoctor"])
    assert (body["trainer"], body["trainer_version"], body["config"]["beta"]) == ("trl", "1.16.0", 0.5)


CORRECTED = {
    "trainer": "verl",
    "trainer_version": "0.9.1",
    "config": {
        "algorithm.adv_estimator": "rloo",
        "trainer.use_v1": False,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        "algorithm.rollout_correction.rollout_rs": "token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.3_2.0",
    },
}


def test_the_rollout_correction(tmp_path):
    """Trainer over sampler is 1 and 3 (cut to 2) in the first row, 1/4 in the second.

    verl rejects by the sampler over the trainer: 1/3 is within 0.3 and 2, and 4 is not.
    """
    old = [[-1.0, -1.0], [-2.0, -9.0], [-1.0], []]
    sampler = [[-1.0, -1.0 - math.log(3)], [-2.0 + math.log(4), -1.0], [-1.0], []]
    columns = small(
        old_log_probs=old,
        rollout_log_probs=sampler,
        response_mask=[[1, 1], [0, 0], [1], []],
        response_mask_pre=[[1, 1], [1, 0], [1], []],
    )
    result, rows = recomputed(write(tmp_path / "run.parquet", columns, CORRECTED), tmp_path / "out.parquet")
    assert result.columns[-2:] == ("is_weights_re", "response_mask_re")
    assert rows["response_mask_re"] == [[1, 1], [0, 0], [1], []]
    assert flat(rows["is_weights_re"]) == pytest.approx([1, 2, 0, 0, 1])
    del columns["response_mask_pre"]
    result, rows = recomputed(write(tmp_path / "less.parquet", columns, CORRECTED), tmp_path / "out.parquet")
    assert rows["response_mask_re"] == [None] * 4
    assert any("response_mask_re is null" in note for note in result.notes)


@pytest.mark.slow
def test_the_rejection_of_the_sample_is_the_one_that_happened(tmp_path):
    path = Path(__file__).parent.parent.parent / "sample_data" / "verl_rejected.parquet"
    _, rows = recomputed(path, tmp_path / "out.parquet")
    assert rows["response_mask_re"] == pq.read_table(path).to_pydict()["response_mask"]
    assert "is_weights_re" not in rows


@pytest.mark.parametrize(
    ("estimator", "ids", "fix", "merged"),
    [
        ("grpo_vectorized", ["7", "7", "007", "007"], [], True),
        ("grpo_vectorized", ["7", "7", "b", "b"], [], False),
        ("grpo", ["7", "7", "007", "007"], [], False),
        ("rloo_vectorized", ["7", "7", "007", "007"], [], False),
        ("rloo_vectorized", ["7", "7", "007", "007"], ["rejected-rows"], False),
        ("rloo_vectorized", ["7", "7", "007", "007"], ["rejected-rows:pr6452"], True),
    ],
)
def test_group_ids_that_are_one_number_are_noted(tmp_path, estimator, ids, fix, merged):
    metadata = {"trainer": "verl", "trainer_version": "0.9.1", "config": {"algorithm.adv_estimator": estimator}}
    path = write(tmp_path / "run.parquet", small(group_id=ids), metadata)
    result, rows = recomputed(path, tmp_path / "out.parquet", fixes=fix)
    note = (
        "1 group more than the trainer has: it reads group ids that are whole numbers as numbers, so ids such as '7' "
        "and '007' of step 0 are one group"
    )
    assert (note in result.notes) == merged
    if merged and not fix:
        # One group of rewards 1, 0, 1, 1, and of standard deviation 0.5.
        assert rows["advantages_re"][1] == pytest.approx([-0.75 / (0.5 + 1e-6), 0.0])
    comparison = diff(open_run([path]), DiffOptions(device="cpu", fixes=tuple(map(choose, fix or ["rejected-rows"]))))
    assert (note in comparison.notes) == merged


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("metadata", "words"),
    [(SCALED, "group statistics are float32 sums, as TRL's"), (VERL, "statistics of groups and batches float64")],
    ids=["trl", "verl"],
)
def test_which_statistics_are_float32_is_said(tmp_path, metadata, words, dtype):
    """Eight times 0.3 has a mean that is not 0.3 in float32; on the CPU the rest is the advantage of TRL."""
    columns = {
        "step": [0] * 8,
        "group_id": ["a"] * 8,
        "sample_id": [str(row) for row in range(8)],
        "reward": [0.3] * 8,
        "response_mask": [[1]] * 8,
        "policy_log_probs": [[-1.0]] * 8,
        "ref_log_probs": [[-1.5]] * 8,
    }
    path = write(tmp_path / "run.parquet", columns, metadata)
    result, rows = recomputed(path, tmp_path / "out.parquet", dtype=dtype)
    assert any(words in note for note in result.notes) == (dtype == "float32")
    reward_N = torch.full((8,), 0.3)
    mean, std = reward_N.nanmean(), ((reward_N - reward_N.nanmean()) ** 2).nanmean().mul(8 / 7).sqrt()
    residue = float((reward_N[0] - mean) / (std + 1e-4))
    wanted = residue if metadata["trainer"] == "trl" and dtype == "float32" else 0.0
    assert flat(rows["advantages_re"]) == pytest.approx([wanted] * 8, abs=1e-12)
