"""What the real loss of unsloth-zoo gave, recomputed: loss, gradient, `kl` and `completion_length`; and its faults."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from goldens import trl_releases as releases
from goldens import unsloth_steps as steps
from objectives import objective_of
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.loss import loss_radius
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS, trainer_from_metric_names

SINGLE = Bound(2e-6, 1e-9, "several sums of float32 in another order, and a k3 that cancels")

pytestmark = [compared("golden", SINGLE)]


@cache
def stored() -> tuple[np.ndarray, dict]:
    with np.load(steps.FILE) as file:
        return file["values"], json.loads(bytes(file["index"]).decode())


@cache
def of_trl() -> tuple[np.ndarray, dict]:
    with np.load(releases.FILE) as file:
        return file["values"], json.loads(bytes(file["index"]).decode())


def wanted(entry: tuple, name: str) -> torch.Tensor:
    values, index = stored()
    start, count = index["/".join(entry[:3])][name]
    return torch.from_numpy(values[start : start + count])


def by_zoo() -> list:
    return [
        pytest.param(
            [entry for entry in steps.entries() if entry[0] == zoo],
            id=zoo,
            marks=[
                covers("unsloth", option, value)
                for _, options in steps.configurations(zoo)
                for option, value in options.items()
            ],
        )
        for zoo in steps.ZOOS
    ]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("entries", by_zoo())
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_loss(entries, name):
    dtype = {"f32": torch.float32, "f64": torch.float64}[name]
    for entry in entries:
        zoo, case, _, options = entry
        batch, mine = steps.batch_of(case, options, zoo), steps.objective(zoo, options)
        found = evaluate(batch, mine, dtype=dtype, per_token=True)
        words, single = "/".join(entry[:3]), dtype == torch.float32
        loss, grad = float(wanted(entry, f"{name}/loss")), wanted(entry, f"{name}/grad")
        rounding = float(loss_radius(found)) if single else 0.0
        agree(found.loss, loss, dtype, f"{words} loss", scale=abs(loss), rounding=rounding)
        agree(found.per_token.grad_T.abs().sum(), grad[-1], dtype, f"{words} gradient")
        own = releases.projections(found.per_token.grad_T)
        agree(own, grad[:-1], dtype, f"{words} gradient", scale=float(grad[-1]))
        own = TRAINERS["unsloth"].metrics(found)
        length, kl = wanted(entry, f"{name}/metrics").tolist()
        agree(own["completion_length"], length, dtype, f"{words} completion_length")
        if case == steps.EMPTY and np.isnan(kl):
            assert np.isnan(own["kl"]), words
            continue
        agree(own["kl"], kl, dtype, f"{words} kl", scale=max(abs(kl), 1e-3))


def test_a_row_without_a_token_makes_the_logged_kl_nan():
    """But for one term per row without a KL, which is a zero of the row."""
    of_empty = {entry[::2][:2]: wanted(entry, "f64/metrics")[1] for entry in steps.entries() if entry[1] == steps.EMPTY}
    counted = {entry: not kl.isnan() for entry, kl in of_empty.items()}
    assert {name for (zoo, name), number in counted.items() if number and not steps.is_new(zoo)} == {
        *("sequence_without_kl", "luspo", "luspo_weights"),
    }
    assert all(number for (zoo, _), number in counted.items() if steps.is_new(zoo))


def test_a_truncated_mode_without_bounds_is_refused_as_trl_does():
    bounds = {"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_cap": None}
    weighed = {"use_vllm": True, "vllm_importance_sampling_correction": True, **bounds}
    for mode in ("token_truncate", "sequence_truncate"):
        with pytest.raises(UsageError, match="needs vllm_importance_sampling_clip_min or _clip_max"):
            objective_of("unsloth@1.6.0", vllm_importance_sampling_mode=mode, **weighed)
    objective_of("unsloth@1.6.0", vllm_importance_sampling_mode="token_mask", **weighed)


def test_luspo_of_tokens_leaves_the_loss_unknown():
    """Before 2026.9.8: from then on it is TRL's mean of sums."""
    of_rows = {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0, "unsloth_zoo": "2026.8.13"}
    assert not objective_of("unsloth@1.5.0", **of_rows).unknown_loss
    for other in ({"beta": 0.1}, {"importance_sampling_level": "token"}):
        assert "padded cells" in objective_of("unsloth@1.5.0", **of_rows | other).unknown_loss
        assert not objective_of("unsloth@1.5.0", **of_rows | other | {"unsloth_zoo": "2026.9.8"}).unknown_loss
    with pytest.raises(UsageError, match=r"luspo came with unsloth-zoo 2026\.7\.1, and the run has 2026\.5\.1"):
        objective_of("unsloth@1.5.0", **of_rows | {"unsloth_zoo": "2026.5.1"})


def test_truncated_rows_are_trained_and_not_counted_from_trl_1_9_on():
    """The loss makes its mask anew, and the tokens are counted with TRL's; from 2026.9.8 on they stay masked."""
    for version, counted_before, left_out in (("1.8.0", True, False), ("1.9.0", False, True)):
        for zoo, anew in (("2026.9.7", True), ("2026.9.8", False)):
            rule = objective_of(f"unsloth@{version}", loss_type="dapo", unsloth_zoo=zoo, unsloth="2026.9.7").aggregation
            assert (rule.counted_before_rejection, rule.leaves_out_truncated) == (counted_before, left_out and anew)
    old = {"unsloth_zoo": "2026.8.13"}
    assert "status" in loss_columns(objective_of("unsloth@1.9.0", loss_type="dapo", **old))
    assert "status" not in loss_columns(
        objective_of("unsloth@1.9.0", loss_type="bnpo", mask_truncated_completions=True, **old)
    )


def default_options(zoo: str, trl: str, **stated: object) -> dict[str, object]:
    """What the configuration class makes of options that were not stated."""
    config = resolve(
        TRAINERS["unsloth"].options,
        parse_version(trl),
        [Layer("test", {"unsloth_zoo": zoo, **stated})],
        trainer="unsloth",
    )
    return {name: config[name] for name in ("loss_type", "beta", "epsilon_high", "mask_truncated_completions")}


@pytest.mark.parametrize(
    ("zoo", "trl", "stated", "expected"),
    [
        ("2026.8.13", "0.24.0", {}, ("bnpo", 0.001, None, False)),
        ("2026.9.11", "0.24.0", {}, ("bnpo", 0.001, None, False)),
        ("2026.9.12", "0.24.0", {}, ("dapo", 0.0, None, False)),
        ("2026.9.12", "0.21.0", {}, ("bnpo", 0.001, None, False)),
        ("2026.10.9", "1.15.0", {"loss_type": "dapo"}, ("dapo", 0.0, 0.28, True)),
        ("2026.10.9", "1.15.0", {"loss_type": "dapo", "epsilon_high": 0.3}, ("dapo", 0.0, 0.3, True)),
        (
            "2026.10.9",
            "1.15.0",
            {"loss_type": "dapo", "mask_truncated_completions": False, "beta": 0.1},
            ("dapo", 0.1, 0.28, False),
        ),
        ("2026.10.9", "1.15.0", {"loss_type": "cispo"}, ("cispo", 0.001, 5.0, False)),
        ("2026.10.9", "1.15.0", {"loss_type": "dr_grpo"}, ("dr_grpo", 0.0, None, False)),
        ("2026.10.9", "1.15.0", {"loss_type": "grpo"}, ("grpo", 0.001, None, False)),
        ("2026.10.9", "1.15.0", {"unsloth": "2026.9.10"}, ("bnpo", 0.001, None, False)),
    ],
)
def test_defaults_follow_the_release_and_what_is_stated(zoo, trl, stated, expected):
    assert tuple(default_options(zoo, trl, **stated).values()) == expected


@pytest.mark.parametrize(
    ("zoo", "state"), [("2026.10.9", "read"), ("2026.1.2", "read"), ("2026.10.10", "not read"), ("2024.12.1", "older")]
)
def test_a_release_of_its_loss_that_was_not_read_proves_nothing(zoo, state):
    trainer = TRAINERS["unsloth"]
    config = resolve(trainer.options, (1, 15, 0), [Layer("test", {"unsloth_zoo": zoo})], trainer="unsloth")
    found = trainer.whole_release(trainer.release("1.15.0"), config)
    assert found.state == state
    assert ("unsloth_zoo" in found.words) == (state != "read")
    assert found.numbers == (1, 15, 0)


@pytest.mark.parametrize("mode", ["geometric_mask", "geometric_truncate"])
def test_geometric_modes_came_with_a_release(mode):
    given = {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
    (gate,) = objective_of("unsloth@1.15.0", **given).gates
    assert gate.level == "geometric"
    with pytest.raises(UsageError, match=r"came with unsloth-zoo 2026\.10\.7, and the run has 2026\.10\.6"):
        objective_of("unsloth@1.15.0", unsloth_zoo="2026.10.6", **given)


def test_sampling_metrics_are_over_trained_tokens():
    """At every forward pass, and before Unsloth 2026.10.4 over padded cells."""
    (entry,) = [one for one in steps.entries() if one[:3] == ("2026.10.9", "ragged", "geometric_mask")]
    batch = steps.batch_of("ragged", entry[3], "2026.10.9")
    found = TRAINERS["unsloth"].metrics(evaluate(batch, steps.objective("2026.10.9", entry[3])))
    gap_T = (batch.column("old_log_probs") - batch.column("rollout_log_probs")).abs()
    micro_T = torch.repeat_interleave(batch.per_row["micro_batch_id"], batch.rows.diff())
    means = [float(gap_T[micro_T == micro].mean()) for micro in (0, 1)]
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(means) / 2, rel=1e-6)
    before = objective_of(
        "unsloth@1.9.0", unsloth_zoo="2026.10.3", **entry[3] | {"vllm_importance_sampling_mode": "token_mask"}
    )
    assert not [name for name in TRAINERS["unsloth"].metrics(evaluate(batch, before)) if name.startswith("sampling/")]


ADVANTAGES = {
    "kl": {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
    "unscaled": {"scale_rewards": "none"},
    "batch": {"scale_rewards": "batch"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": releases.WEIGHTS},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[covers("unsloth", option, value) for option, value in options.items()])
        for name, options in ADVANTAGES.items()
    ],
)
def test_advantages_are_those_of_trl(name):
    compared_with = 0
    for entry in releases.entries():
        if entry[1:2] + entry[3:4] == ("0.27.2", name) and entry[0] == "trl":
            options = {"num_iterations": 2, **ADVANTAGES[name]}
            batch = releases.batch_of("trl", entry[2], "0.27.2", options)
            found = evaluate(batch, objective_of("unsloth@0.27.2", **options), dtype=torch.float64).rows
            values, index = of_trl()
            start, count = index["/".join(entry[:4])]["f64/advantages"]
            agree(found.advantage_N, torch.from_numpy(values[start : start + count]), torch.float64, "advantages")
            compared_with += 1
    assert compared_with > 1


def checked(loss_type: str, zoo: str = "2026.8.13", *, masked: bool = False, stated: str = ""):
    """The report of a run whose loss and metrics the real functions made, from a mask that is theirs, or TRL's."""
    (entry,) = [one for one in steps.entries() if one[:3] == (zoo, "truncated", loss_type)]
    options = {"gradient_accumulation_steps": releases.ACCUMULATION, "max_completion_length": releases.WIDTH}
    options |= {**entry[3], "num_generations": 4, "unsloth_zoo": stated or zoo, "mask_truncated_completions": masked}
    batch = steps.batch_of("truncated", entry[3], zoo)
    columns = {name: value.float() if value.is_floating_point() else value for name, value in batch.per_token.items()}
    if masked:
        kept_N = torch.tensor([status == "stop" for status in batch.statuses])
        columns["response_mask"] = batch.column("response_mask") & torch.repeat_interleave(kept_N, batch.rows.diff())
    advantage_N = evaluate(batch, steps.objective(zoo, entry[3])).rows.advantage_N
    del columns["rollout_log_probs"]
    batch = replace(batch, per_token=columns, per_row={**batch.per_row, "advantage": advantage_N.float().double()})
    length, kl = wanted(entry, "f32/metrics").tolist()
    logged = {"loss": float(wanted(entry, "f32/loss")), "kl": kl, "completion_length": length}
    return diagnose([batch], trainer=f"unsloth@{steps.release_of(entry[3])}", options=options, logged=logged)


def test_a_healthy_run_gives_no_warning():
    report = checked("bnpo")
    assert [one.code for one in report.findings if one.severity != Severity.INFO] == []
    agree_of = {each.quantity: each.agree for each in report.audit}
    assert [agree_of[name] for name in ("loss", "kl", "completion_length")] == [1, 1, 1]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_truncated_completions_that_come_back_are_found(loss_type):
    """The mask that the run states is not the one of its loss."""
    found = {one.code: one for one in checked(loss_type, masked=True).findings}
    assert found["RDG005"].verdict == "confirmed"
    assert "rejected-tokens-trained" in (found["RDG005"].cause.hypothesis, *found["RDG005"].cause.also)
    assert found["RDG005"].measures["relative_change_l1"].value > 0.5


@pytest.mark.slow
def test_chunks_of_one_row_show_in_the_loss():
    """A run of a release that took every row for a chunk, stated as a newer one."""
    assert "RDG005" not in {one.code for one in checked("bnpo", "2026.1.2").findings}
    report = checked("bnpo", "2026.1.2", stated="2026.8.13")
    assert {each.quantity: each.agree for each in report.audit}["loss"] == 0


def test_its_log_is_known_by_two_names_together():
    both = ["loss", "grad_norm", "kl", "completion_length", "completions/mean_length"]
    assert trainer_from_metric_names(both).name == "unsloth"
    assert trainer_from_metric_names(both[:4]).name == "trl"
    assert trainer_from_metric_names([*both[:3], both[4]]).name == "trl"
