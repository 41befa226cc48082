"""Every fix in `diff`, `plot`, `recompute` and `view`, of a run in which it changes something."""

import numpy as np
import polars as pl
import pytest
from engine.runs import random_columns, write

import rolloutdoctor as rd
from rolloutdoctor.commands.view.query import Inspector
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.options import CheckOptions

OPTIONS = {
    "kl-of-rejected": {"beta": 0.5, "use_vllm": True, "vllm_importance_sampling_clip_max": 1.2},
    "exact-equality-std": {"beta": 0.0},
    "truncated-out-of-denominator": {"beta": 0.5, "mask_truncated_completions": True},
    "is-mean-not-sum": {"beta": 0.0, "use_vllm": True},
    "mask-truncated-vote": {"beta": 0.0, "mask_truncated_completions": True},
    "global-denominator": {"beta": 0.5, "loss_type": "bnpo", "gradient_accumulation_steps": 2},
}
"""Fix to the options of a run of TRL."""


@pytest.fixture
def run(request, tmp_path):
    columns = random_columns(3, groups=3, size=8)
    columns["reward"] = (np.array(columns["reward"]) * 0.3).tolist()
    draw, count = np.random.default_rng(1), len(columns["step"])
    columns["rollout_log_probs"] = [x - draw.normal(0, 0.1, len(x)).astype("float32") for x in columns["old_log_probs"]]
    columns["response_mask_pre"] = [np.ones_like(mask) for mask in columns["response_mask"]]
    columns["status"] = ["stop" if mask.any() else "length" for mask in columns["response_mask"]]
    columns["micro_batch_id"] = [row % 24 // 12 for row in range(count)]
    release = "1.8.0" if request.param == "truncated-out-of-denominator" else "1.16.0"
    config = {"loss_type": "dapo", "num_generations": 8, **OPTIONS[request.param]}
    metadata = {"schema_version": 1, "trainer": "trl", "trainer_version": release, "config": config}
    return request.param, write(tmp_path / "run.parquet", columns, metadata)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("run", OPTIONS, indirect=True)
def test_every_command_has_the_fix(run, tmp_path):
    fix, path = run
    (effect,) = rd.diff(path, fixes=[fix], device="cpu").effects
    assert effect.differs
    assert effect.total["spurious_share_l1"].value > 1e-9
    every = rd.diff(path, all_fixes=True, device="cpu")
    (same,) = [each for each in every.effects if each.label == effect.label]
    assert (same.total, same.metrics) == (effect.total, effect.metrics)
    drawn = rd.plot("gradient", path, fixes=[fix], device="cpu")
    words = "".join(text.get_text() for text in drawn.findobj(lambda part: hasattr(part, "get_text")))
    assert effect.label in words
    found = rd.recompute(path, tmp_path / "out.parquet", fixes=[fix], device="cpu")
    moved = [abs(step.fixed.grad_l1 - step.before.grad_l1) for step in found.steps]
    assert max(moved) > 1e-9
    rows = pl.read_parquet(tmp_path / "out.parquet").explode("grad_re", "grad_re_fixed")
    gap = (rows["grad_re"] - rows["grad_re_fixed"]).abs().sum()
    assert gap == pytest.approx(
        sum(
            step.measures["spurious_share_l1"].value * step.measures["grad_l1_before"].value for step in effect.per_step
        ),
        rel=1e-4,
    )
    inspector = Inspector(rd.open(path), CheckOptions(device="cpu"), [str(path)])
    assert fix in inspector.overview().fixes
    changes = [line.change for line in inspector.step(StepKey(0, "train"), fix).groups]
    assert max(changes) > 0
