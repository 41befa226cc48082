import math
from dataclasses import replace

import numpy as np
import pytest
from engine.runs import TRL, VERL, random_columns, small, write
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.commands.diff.query import diff
from rolloutdoctor.commands.diff.sides import DiffOptions
from rolloutdoctor.engine.breakdown import PARTS
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.options import Layer


def compared(path, *fixes, **options):
    given = DiffOptions(fixes=tuple(map(choose, fixes)), device="cpu", **{"dtype": "float64", **options})
    return diff(open_run([path]), given)


def values(measures):
    return {name: measure.value for name, measure in measures.items()}


def total(path, *fixes, **options):
    return values(compared(path, *fixes, **options).effects[0].total)


def test_a_row_that_was_rejected_stops_voting(tmp_path):
    """Leave-one-out of 100 and 1: the survivor gets 1 - 100 with all voting, and its raw score alone."""
    columns = {
        "step": [0, 0, 0, 0],
        "group_id": ["a", "a", "b", "b"],
        "sample_id": ["1", "2", "3", "4"],
        "reward": [100.0, 1.0, 1.0, 0.0],
        "response_mask": [[0, 0], [1, 1], [1], [1]],
        "policy_log_probs": [[-1.0, -1.0], [-1.0, -2.0], [-0.5], [-1.0]],
    }
    found = total(write(tmp_path / "run.parquet", columns, VERL), "rejected-rows")
    assert {name: found[name] for name in list(found)[:12]} == {
        "rows": 4, "unmasked_rows": 3, "groups": 2,
        "changed_rows": 1, "changed_groups": 1, "undefined_rows": 0,
        "advantage_shift_mean": 100.0, "advantage_shift_max": 100.0, "sign_flips": 1,
        "drifted_rows": 1, "baseline_drift_mean": 100.0, "baseline_drift_max": 100.0,
    }  # fmt: skip
    # Four trained tokens: the loss is minus their mean advantage, and so is each derivative over four.
    assert (found["loss_before"], found["loss_after"]) == pytest.approx((198 / 4, -2 / 4))
    assert (found["grad_l1_before"], found["grad_l1_after"]) == pytest.approx((200 / 4, 4 / 4))
    assert found["spurious_share_l1"] == pytest.approx(200 / 200)
    assert "kl_only_share_l1" not in found
    assert found["relative_change_l1"] == pytest.approx(200 / 4)
    assert found["kappa"] == pytest.approx((-198 + 2) / 4)
    assert found["cosine"] == pytest.approx((-198 + 2) / math.sqrt((2 * 99**2 + 2) * 4))
    assert (found["other_rows"], found["other_rows_rescaled"], found["other_rows_scale"]) == (2, 0, 1.0)


def test_the_kl_of_a_group_without_spread(tmp_path):
    found = total(write(tmp_path / "run.parquet", small()), "zero-std")
    kl, slope = math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)
    assert (found["changed_rows"], found["drifted_rows"], found["sign_flips"]) == (0, 0, 0)
    assert found["advantage_shift_mean"] is None
    assert found["loss_after"] - found["loss_before"] == pytest.approx(-kl / 8)
    assert found["policy_loss_after"] == found["policy_loss_before"] == pytest.approx(-0.5 / 4)
    assert (found["kl_loss_before"], found["kl_loss_after"]) == pytest.approx((kl / 2, kl * 3 / 8))
    dead = slope / 8
    alive = 2 * abs(-0.5 / 4 + dead) + (0.5 / 4 + dead)
    assert found["spurious_share_l1"] == pytest.approx(dead / (dead + alive))
    assert found["kl_only_share_l1"] == found["spurious_share_l1"]
    assert found["relative_change_l1"] == pytest.approx(dead / alive)
    assert found["kappa"] == pytest.approx(1)
    assert (found["other_rows"], found["other_rows_rescaled"]) == (2, 0)


def test_a_denominator_is_everyones_learning_rate(tmp_path):
    columns = random_columns(0, steps=1)
    effect = compared(write(tmp_path / "run.parquet", columns), "zero-std:renormalised").effects[0]
    found = values(effect.total)
    live = [mask.sum() for mask in columns["response_mask"]]
    dead = 0
    for group in range(0, len(live), 4):
        if len(set(columns["reward"][group : group + 4])) == 1:
            dead += sum(live[group : group + 4])
    factor = sum(live) / (sum(live) - dead)
    assert dead
    assert factor > 1
    assert found["other_rows"] == found["other_rows_rescaled"] > 0
    for name in ("other_rows_scale", "weight_ratio_mean", "weight_ratio_min", "weight_ratio_max"):
        assert found[name] == pytest.approx(factor), name
    assert any("learning rate" in remark for remark in effect.remarks)


def test_nothing_against_nothing(tmp_path):
    path = write(tmp_path / "run.parquet", random_columns(1))
    comparison = compared(path, against=["beta=0.5"], top=3)
    (effect,) = comparison.effects
    found = values(effect.total)
    assert not comparison.differs
    assert effect.groups == ()
    assert effect.remarks == ("nothing changes: advantages, loss and gradient are the same",)
    assert (found["kappa"], found["spurious_share_l1"]) == (pytest.approx(1), 0)
    for name in ("changed_rows", "drifted_rows", "sign_flips", "advantage_shift_max", "other_rows_rescaled"):
        assert found[name] == 0, name
    for stem in ("loss", "policy_loss", "kl_loss", "kl", "grad_l1", "grad_l2"):
        assert found[f"{stem}_before"] == found[f"{stem}_after"], stem
    assert all(pair.before == pair.after for pair in effect.metrics.values())


def test_another_configuration(tmp_path):
    """Without the KL term the KL loss goes and the policy loss stays."""
    path = write(tmp_path / "run.parquet", random_columns(2))
    comparison = compared(path, against=["beta=0"])
    found = values(comparison.effects[0].total)
    assert comparison.differs
    assert comparison.effects[0].label == "beta=0"
    assert found["kl_loss_after"] == 0 < found["kl_loss_before"]
    assert found["policy_loss_after"] == found["policy_loss_before"]
    swapped = total(path, against=["beta=0.5"], layers=[Layer("test", {"beta": 0})])
    assert swapped["kl_loss_before"] == 0
    assert swapped["kl_loss_after"] == found["kl_loss_before"]
    assert swapped["spurious_share_l1"] == found["relative_change_l1"]


def test_effects_in_disjoint_scopes_add_up(tmp_path):
    """Groups without a rejected row have equal rewards, groups with one have not."""
    columns = random_columns(3)
    for start in range(0, len(columns["step"]), 4):
        rows = range(start, start + 4)
        dead = any(not columns["response_mask"][row].any() for row in rows)
        for place, row in enumerate(rows):
            columns["reward"][row] = float(place) if dead else 1.0
    path = write(tmp_path / "run.parquet", columns)
    together, one, other = compared(path, "zero-std", "rejected-rows:singleton-zero").effects
    assert (together.joint, one.joint, other.joint) == (True, False, False)
    assert (one.label, other.label) == ("zero-std:loss", "rejected-rows:singleton-zero")
    assert together.label == "zero-std:loss + rejected-rows:singleton-zero"
    a, b, c = values(together.total), values(one.total), values(other.total)
    assert b["changed_rows"] == 0 < c["changed_rows"]
    for name in ("changed_rows", "changed_groups", "sign_flips", "drifted_rows"):
        assert a[name] == b[name] + c[name], name
    for name in ("spurious_share_l1",):
        assert a[name] == pytest.approx(b[name] + c[name]), name
    for stem in ("loss", "policy_loss", "kl_loss", "grad_l1"):
        change = [found[f"{stem}_after"] - found[f"{stem}_before"] for found in (a, b, c)]
        assert change[0] == pytest.approx(change[1] + change[2], abs=1e-12), stem


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_rows_and_files_may_come_in_any_order(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp("run")
    columns = random_columns(seed % 50)
    order = np.random.default_rng(seed).permutation(len(columns["step"])).tolist()
    one = compared(write(folder / "run.parquet", columns), "rejected-rows", "zero-std", by="reward")
    (folder / "parts").mkdir()
    for part in range(3):
        write(folder / "parts" / f"{part}.parquet", columns, rows=order[part::3], row_group_size=5)
    other = compared(folder / "parts", "rejected-rows", "zero-std", by="reward")
    for mine, theirs in zip(one.effects, other.effects, strict=True):
        for a, b in zip((*mine.per_step, *mine.parts), (*theirs.per_step, *theirs.parts), strict=True):
            assert a.where == b.where
            close(values(a.measures), values(b.measures))
        close(values(mine.total), values(theirs.total))


def close(mine, theirs, rel=1e-9):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if value is None or theirs[name] is None:
            assert value is theirs[name], name
        else:
            assert value == pytest.approx(theirs[name], rel=rel, abs=1e-12), name


@pytest.mark.parametrize("by", PARTS)
def test_parts_add_up_to_the_run(tmp_path, by):
    path = write(tmp_path / "run.parquet", random_columns(4))
    effect = compared(path, "rejected-rows", by=by).effects[0]
    whole, parts = values(effect.total), [values(part.measures) for part in effect.parts]
    assert len(parts) > 2
    for name in ("rows", "unmasked_rows", "changed_rows", "sign_flips"):
        assert sum(part[name] for part in parts) == whole[name], name
    if by in ("step", "group"):
        assert sum(part["changed_groups"] for part in parts) == whole["changed_groups"] > 0
    assert max(part["advantage_shift_max"] for part in parts) == whole["advantage_shift_max"]
    scale = len(parts) if by == "step" else 1
    for name in ("loss_before", "loss_after", "kl_loss_after"):
        assert sum(part[name] for part in parts) / scale == pytest.approx(whole[name]), name
    assert sum(part["grad_l1_before"] for part in parts) == pytest.approx(whole["grad_l1_before"])


def test_rewards_become_few_parts(tmp_path):
    columns = random_columns(5)
    columns["reward"] = np.random.default_rng(0).normal(size=len(columns["step"])).tolist()
    columns["reward"][3] = None
    columns["reward"][4] = math.inf
    path = write(tmp_path / "run.parquet", columns)
    parts = compared(path, "rejected-rows", by="reward").effects[0].parts
    assert 5 <= len(parts) <= 11
    assert parts[-1].where == {"reward": "none"}
    assert sum(part.measures["rows"].value for part in parts) == len(columns["step"])


def test_lengths_are_powers_of_two(tmp_path):
    columns = random_columns(6)
    parts = compared(write(tmp_path / "run.parquet", columns), "zero-std", by="length").effects[0].parts
    lengths = np.array([mask.sum() for mask in columns["response_mask"]])
    low = np.array([0, 1, 2, 4, 8])
    assert [part.where["length"] for part in parts] == ["0", "1", "2 to 3", "4 to 7", "8 to 15"]
    counts = [int(((lengths >= start) & (lengths < max(2 * start, 1))).sum()) for start in low]
    assert [part.measures["rows"].value for part in parts] == counts


def test_the_groups_that_moved_most(tmp_path):
    columns = random_columns(7) | {"prompt": [f"p{row}" for row in range(72)]}
    columns["response"] = [[{"role": "assistant", "content": f"r{row}"}] for row in range(72)]
    path = write(tmp_path / "run.parquet", columns, row_group_size=10)
    effect = compared(path, "rejected-rows", top=4, text=True, by="group").effects[0]
    moved = {
        (part.where["step"], part.where["group_id"]): (part.measures["spurious_share_l1"].value or 0)
        * (part.measures["grad_l1_before"].value or 0)
        for part in effect.parts
    }
    assert len(effect.groups) == 4
    assert [group.moved for group in effect.groups] == pytest.approx(sorted(moved.values(), reverse=True)[:4])
    for group in effect.groups:
        assert group.moved == pytest.approx(moved[group.step, group.group_id])
        assert group.size == len(group.rows) == 4
        for row in group.rows:
            number = int(row.sample_id[1:])
            assert f"g{number // 4}" == group.group_id
            assert (row.prompt, row.response) == (f"p{number}", f"r{number}")
            assert row.reward == columns["reward"][number]
    assert compared(path, "rejected-rows", top=1).effects[0].groups[0].rows[0].prompt is None


def test_metrics_alone_may_change(tmp_path):
    metadata = {
        "trainer": "slime",
        "trainer_version": "0.3.1",
        "config": {"advantage_estimator": "ppo", "kl_coef": 0.1, "kl_loss_type": "k1"},
    }
    columns = random_columns(8) | {"rollout_log_probs": random_columns(8)["old_log_probs"]}
    columns["values"] = [np.zeros(len(row), "float32") for row in columns["old_log_probs"]]
    comparison = compared(write(tmp_path / "run.parquet", columns, metadata), "kl-inplace")
    (effect,) = comparison.effects
    assert comparison.differs
    assert [name for name, pair in effect.metrics.items() if pair.before != pair.after] == ["rollout/kl"]
    assert effect.remarks[0].startswith("only metrics change")
    assert values(effect.total)["changed_rows"] == 0


def test_advantages_with_a_time_axis(tmp_path):
    metadata = {
        "trainer": "slime",
        "trainer_version": "0.3.1",
        "config": {"advantage_estimator": "ppo", "kl_coef": 0.0, "gamma": 1.0, "lambd": 1.0},
    }
    columns = {
        "step": [0, 0], "group_id": ["a", "a"], "sample_id": ["1", "2"], "reward": [1.0, 0.0],
        "response_mask": [[1, 1], [1]], "policy_log_probs": [[-1.0, -1.0], [-1.0]],
        "ref_log_probs": [[-1.0, -1.0], [-1.0]], "values": [[0.5, 0.0], [0.0]],
    }  # fmt: skip
    # Discounted by 0.5 the first token of the first row sees 0.5 - 0.5 where it saw 1 - 0.5; the last one sees 1.
    found = total(write(tmp_path / "run.parquet", columns, metadata), against=["gamma=0.5"])
    assert (found["changed_rows"], found["unmasked_rows"]) == (1, 2)
    assert found["advantage_shift_max"] == pytest.approx(0.25)


def test_without_log_probs_advantages_alone(tmp_path):
    columns = random_columns(9)
    for name in ("policy_log_probs", "old_log_probs", "ref_log_probs"):
        del columns[name]
    comparison = compared(write(tmp_path / "run.parquet", columns), "rejected-rows", top=2)
    found = values(comparison.effects[0].total)
    assert found["changed_rows"] > 0
    assert found["loss_before"] is found["kappa"] is found["other_rows"] is None
    assert comparison.effects[0].moved_by == "absolute change of advantages"
    assert len(comparison.effects[0].groups) == 2
    assert "policy_log_probs" in comparison.notes[0]


def test_training_and_evaluation_are_never_mixed(tmp_path):
    columns = random_columns(10)
    columns["split"] = ["train" if step < 2 else "eval" for step in columns["step"]]
    path = write(tmp_path / "run.parquet", columns)
    assert compared(path, "zero-std").input.steps == 2
    assert compared(path, "zero-std", split="eval").input.steps == 1
    assert not compared(path, "zero-std", split="eval").differs  # the fix is about train rows


@pytest.mark.parametrize(
    ("fixes", "options", "error", "words"),
    [
        ([], {}, UsageError, "nothing to compare with"),
        (["kl-inplace"], {}, UsageError, "applies to slime"),
        (["zero-std"], {"steps": StepRange(7, None)}, UsageError, "no train rows to compare"),
        (["zero-std"], {"split": "eval"}, UsageError, "no eval rows to compare"),
        (["zero-std"], {"by": "day"}, UsageError, "no parts by 'day'"),
        ([], {"against": ["beta"]}, UsageError, "expected KEY=VALUE"),
        ([], {"against": ["betta=1"]}, UsageError, "did you mean 'beta'"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, fixes, options, error, words):
    path = write(tmp_path / "run.parquet", small())
    with pytest.raises(error, match=words):
        compared(path, *fixes, **options)


def test_a_missing_column_is_named(tmp_path):
    columns = {name: cells for name, cells in small().items() if name != "response_mask"}
    path = write(tmp_path / "run.parquet", columns, replace_config(beta=0))
    with pytest.raises(InputError, match="without the column response_mask; "):
        compared(path, "rejected-rows")


def replace_config(**config):
    return TRL | {"config": TRL["config"] | config}


def test_the_same_numbers_in_float32(tmp_path):
    path = write(tmp_path / "run.parquet", random_columns(11), replace_config(loss_type="grpo"))
    one, other = (
        compared(path, "zero-std:renormalised", "rejected-rows", dtype=name) for name in ("float32", "float64")
    )
    for mine, theirs in zip(one.effects, other.effects, strict=True):
        close(values(mine.total), values(theirs.total), rel=1e-4)
    assert replace(one, dtype="") != replace(other, dtype="")


def test_dense_rewards_are_what_advantages_are_made_of(tmp_path):
    """Where rewards are dense the trainer sums them, whatever the column of scores says."""
    metadata = VERL | {"config": VERL["config"] | {"algorithm.adv_estimator": "rloo"}}
    columns = {
        "step": [0] * 3, "group_id": ["a"] * 3, "sample_id": ["1", "2", "3"], "reward": [9.0, 9.0, 9.0],
        "response_mask": [[1, 1], [1], [0]], "policy_log_probs": [[-1.0, -1.0], [-1.0], [-1.0]],
        "token_rewards": [[1.0, 1.0], [0.0], [4.0]],
    }  # fmt: skip
    path = write(tmp_path / "run.parquet", columns, metadata)
    effect = compared(path, "rejected-rows", top=1).effects[0]
    # Of scores 2, 0 and 4 the siblings' means are 2, 3 and 1; without the row that trains nothing 0 and 2.
    found = {row.sample_id: (row.advantage.before, row.advantage.after) for row in effect.groups[0].rows}
    assert {name: found[name] for name in ("1", "2")} == {"1": (0.0, 2.0), "2": (-3.0, -2.0)}
    assert values(effect.total)["changed_rows"] == 2


def test_rows_without_a_score_are_counted_and_move_nothing(tmp_path):
    columns = random_columns(12)
    columns["reward"][3] = columns["reward"][40] = float("nan")
    comparison = compared(
        write(tmp_path / "run.parquet", columns, replace_config(loss_type="grpo")), "rejected-rows", top=3
    )
    found = values(comparison.effects[0].total)
    assert found["rows"] == 72
    assert math.isfinite(found["advantage_shift_max"])
    assert math.isfinite(found["advantage_shift_mean"])
    assert all(math.isfinite(group.moved) for group in comparison.effects[0].groups)


def test_steps_that_the_trainer_cannot_compute_are_said(tmp_path):
    metadata = VERL | {"config": VERL["config"] | {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}}
    columns = random_columns(13, steps=2)
    columns["response_mask"][24:] = [np.zeros(len(row), "uint8") for row in columns["response_mask"][24:]]
    comparison = compared(write(tmp_path / "run.parquet", columns, metadata), "rejected-rows")
    assert comparison.notes[-1].startswith("1 step could not be evaluated, the first is step 1: whitening needs")
    assert len(comparison.effects[0].per_step) == 1
    assert comparison.input.steps == 2


def test_a_step_is_evaluated_once(tmp_path, monkeypatch):
    """However many fixes: each step, and each objective in it, once."""
    from rolloutdoctor.evaluation import device
    from rolloutdoctor.evaluation.joined_steps import StepsTogether

    calls = []
    whole = StepsTogether.whole

    def counting(batch, objectives, **kwargs):
        calls.append((batch.step, len(objectives)))
        return evaluate_all(batch, objectives, **kwargs)

    def counting_all(steps, objectives, per_token=()):
        calls.extend((batch.step, len(objectives)) for batch in steps.batches)
        return whole(steps, objectives, per_token)

    monkeypatch.setattr(device, "evaluate_all", counting)
    monkeypatch.setattr(StepsTogether, "whole", counting_all)
    path = write(tmp_path / "run.parquet", random_columns(14))
    compared(path, "zero-std", "rejected-rows", top=2, by="reward")
    assert calls == [(0, 4), (1, 4), (2, 4)]
    calls.clear()
    compared(path, "rejected-rows", against=["beta=0.5"])  # the option is as it was
    assert calls == [(0, 2), (1, 2), (2, 2)]
