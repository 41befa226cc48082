"""Faults whose numbers nobody knows beforehand, planted into synthetic runs: all are named, and no look-alike is."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import diagnose, random_batch
from rolloutdoctor.trainers.options import Layer

AUDITED = [rule.code for rule in RULES if isinstance(rule, AuditedRule)]
TRL = {"beta": 0.1, "num_generations": 8}
RLOO = {"beta": 0.05, "num_generations": 8}
VERL = {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1}
OPTIONS = {"trl": TRL, "trl-rloo": RLOO, "verl": VERL}


@cache
def configured(trainer, **options):
    return configure(RunMetadata(), trainer, [Layer("test", {**OPTIONS[trainer], **options})])


def steps_of(count=3, groups=4, size=8, **columns):
    """Steps of groups that follow each other, on two ranks in four micro-batches; rewards have two parts."""
    made = []
    for step in range(count):
        batch = random_batch(
            step, sizes=(size,) * groups, rejected=0.0, empty=0.0, spread=0.2, adjacent=True, **columns
        )
        places = torch.arange(len(batch))
        task_N = batch.per_row["reward"]
        draw = torch.Generator().manual_seed(step)
        format_N = torch.randint(0, 3, (len(batch),), generator=draw).double() / 2
        per_row = {**batch.per_row, "reward": task_N + format_N}
        per_row |= {"micro_batch_id": places * 4 // len(batch), "rank": places % 2}
        made.append(replace(batch, step=step, rewards={"task": task_N, "format": format_N}, per_row=per_row))
    return made


def run_of(trainer, batches, advantages=None, rows=None, objective=None, metrics=None, options=None):
    """What `check` says of a trainer that computes other advantages, or of other rows, or by another objective."""
    made = configured(trainer, **(options or {}))
    found, logged = [], []
    for batch in batches:
        seen = batch if rows is None else rows(batch)
        used = made.objective if objective is None else objective(made.objective)

        def amend(part, batch=batch):
            return part if advantages is None else replace(part, advantage_N=advantages(batch, part.advantage_N))

        evaluation = evaluate(seen, used, dtype=torch.float64, amend=amend)
        values = {name: float(torch.tensor(value)) for name, value in made.trainer.metrics(evaluation).items()}
        own = made.trainer.metrics(evaluate(batch, made.objective, dtype=torch.float64))
        values |= {name: float(torch.tensor(value)) for name, value in own.items() if "reward" in name}
        logged.append(values if metrics is None else metrics(values, evaluation))
        advantage_N = evaluation.rows.advantage_N.float().double()
        found.append(replace(batch, per_row={**batch.per_row, "advantage": advantage_N}))
    return diagnose(
        found, trainer=trainer, options={**OPTIONS[trainer], **(options or {})}, logged=logged, select=AUDITED
    )


def causes(report):
    return [(one.code, one.cause.hypothesis) for one in report.findings if one.cause is not None]


def only(report):
    """The one finding of a report."""
    loud = [one for one in report.findings if one.severity > Severity.INFO]
    assert len(loud) == 1, [one.headline for one in loud]
    return loud[0]


def permuted(value_N, seed, size):
    draw = torch.Generator().manual_seed(seed)
    return torch.cat([part[torch.randperm(len(part), generator=draw)] for part in value_N.split(size)])


def again(size):
    def edit(batch, value_N):
        return torch.cat([(part - part.mean()) / (part.std() + 1e-8) for part in value_N.split(size)])

    return edit


PLANTED = {
    "in another order in each group": (
        {"advantages": lambda batch, x: permuted(x, batch.step, 8)}, "RDI004", "another-order-in-group"),
    "in another order in the step": (
        {"advantages": lambda batch, x: permuted(x, batch.step, 32)}, "RDI004", "another-order-in-step"),
    "advantages three rows late": ({"advantages": lambda batch, x: x.roll(3)}, "RDI004", "advantages-3-rows-late"),
    "normalised once more": ({"advantages": again(32)}, "RDA004", "normalised-again-over-step"),
    "a line in each group": (
        {"advantages": lambda batch, x: x * (1 + batch.per_row["reward"][::8].repeat_interleave(8).abs()) + 0.3},
        "RDA004", "line-in-group"),
    "one factor": ({"advantages": lambda batch, x: 1.7 * x}, "RDA004", "constant-factor"),
    "clipped": ({"advantages": lambda batch, x: x.clamp(-1, 1)}, "RDI014", "advantages-clamped"),
    "clipped above": ({"advantages": lambda batch, x: x.clamp(max=0.5)}, "RDI014", "advantages-clamped"),
}  # fmt: skip


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_edited_advantages_are_named(trainer, name):
    fault, code, hypothesis = PLANTED[name]
    finding = only(run_of(trainer, steps_of(), **fault))
    assert (finding.code, finding.cause.hypothesis) == (code, hypothesis)
    assert finding.cause.as_found == finding.cause.compared
    assert finding.verdict == "confirmed"


def moved(batch, rows):
    return replace(batch, per_row={**batch.per_row, "reward": batch.per_row["reward"].roll(rows)})


def blocks(batch, size, offset):
    index_N = (torch.arange(len(batch)) - offset) % len(batch) // size
    return replace(batch, groups=Groups.of(index_N), group_ids=())


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("trainer", "rows"), [("trl", 2), ("trl-rloo", 5), ("verl", -7)])
def test_rewards_some_rows_off(trainer, rows):
    finding = only(run_of(trainer, steps_of(), rows=lambda batch: moved(batch, rows)))
    side = "late" if rows > 0 else "early"
    assert (finding.code, finding.cause.hypothesis) == ("RDI004", f"rewards-{abs(rows)}-rows-{side}")


def with_rewards_of_others(batch, rows, share=1.0):
    """Some rows have the reward of the row so many before them."""
    draw = torch.Generator().manual_seed(batch.step)
    chosen_N = torch.rand(len(batch), generator=draw) < share
    reward_N = batch.per_row["reward"]
    return replace(batch, per_row={**batch.per_row, "reward": reward_N.roll(rows).where(chosen_N, reward_N)})


def eight_late(batch):
    reward_N = batch.per_row["reward"]
    return replace(batch, per_row={**batch.per_row, "reward": torch.cat([reward_N[:8].roll(3), reward_N[8:]])})


def noisy(batch):
    """Some rows have rewards that no row of the step has."""
    draw = torch.Generator().manual_seed(batch.step)
    chosen_N = torch.rand(len(batch), generator=draw) < 0.2
    reward_N = batch.per_row["reward"]
    return replace(batch, per_row={**batch.per_row, "reward": reward_N + 0.1 * chosen_N})


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", OPTIONS)
@pytest.mark.parametrize(("share", "size"), [(0.1, 4), (0.2, 8)])
def test_some_rows_have_the_reward_of_another(trainer, share, size):
    rows = steps_of(groups=32 // size, size=size)
    finding = run_of(trainer, rows, rows=lambda batch: with_rewards_of_others(batch, 5, share)).findings[0]
    assert (finding.code, finding.cause.hypothesis) == ("RDI004", "rewards-of-other-rows")


@pytest.mark.slow
def test_some_rows_moved_across_groups():
    scattered = [
        replace(
            batch,
            groups=Groups.of(batch.groups.index_N[torch.randperm(32, generator=torch.Generator().manual_seed(3))]),
        )
        for batch in steps_of()
    ]
    finding = only(run_of("verl", scattered, rows=eight_late))
    assert (finding.code, finding.cause.hypothesis) == ("RDI004", "rewards-of-other-rows")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("kind", ["rewards of no row", "a lattice", "pairs"])
def test_rewards_that_could_be_of_any_row_accuse_nobody(kind):
    rows = steps_of(groups=16, size=2) if kind == "pairs" else steps_of()
    if kind == "a lattice":
        rows = [
            replace(each, per_row={**each.per_row, "reward": (each.per_row["reward"] * 8).round() / 8}) for each in rows
        ]
        report = run_of("trl", rows, rows=lambda batch: with_rewards_of_others(batch, 5, 0.3))
    else:
        report = run_of("trl", rows, rows=noisy)
    assert "RDA004" in [one.code for one in report.findings]
    assert causes(report) == []


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("bounds", [(None, 0.4), (None, 0.12345), (-0.2, None), (-0.3, 0.8)])
@pytest.mark.parametrize("trainer", OPTIONS)
def test_bounds_of_rewards_are_solved(trainer, bounds):
    def clipped(batch):
        return replace(batch, per_row={**batch.per_row, "reward": batch.per_row["reward"].clamp(*bounds)})

    finding = run_of(trainer, steps_of(), rows=clipped).findings[0]
    low, high = bounds
    said = [f"{name}-{bound:g}" for name, bound in (("below", low), ("above", high)) if bound is not None]
    assert (finding.code, finding.cause.hypothesis) == ("RDM006", f"rewards-clipped-{'-'.join(said)}")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("size", "offset"), [(5, 1), (4, 0), (16, 0), (8, 3)])
def test_blocks_of_any_size(size, offset):
    finding = only(run_of("trl", steps_of(), rows=lambda batch: blocks(batch, size, offset)))
    name = f"groups-of-{size}-rows" + (f"-from-{offset}" if offset else "")
    assert (finding.code, finding.cause.hypothesis) == ("RDI003", name)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"epsilon": 1e-3, "biased_std": True}, "biased-std-epsilon-1e-3"),
        ({"epsilon": 0.01}, "epsilon-0.01"),
        ({"epsilon": 0.037}, "epsilon-0.037"),
        ({"biased_std": True}, "biased-std"),
        ({"epsilon": 0.02, "epsilon_in_root": True}, "epsilon-0.02-in-root"),
    ],
)
def test_the_divisor_is_solved(changes, name):
    def edit(objective):
        return replace(objective, advantage=replace(objective.advantage, **changes))

    finding = only(run_of("verl", steps_of(), objective=edit))
    assert (finding.code, finding.cause.hypothesis) == ("RDA004", name)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("scale", "weights"), [("group", (1.0, 0.5)), ("batch", (0.25, 1.0)), ("none", (1.0, 0.0)), ("group", (1.0, -1.0))]
)
def test_the_weights_of_rewards_are_solved(scale, weights):
    def edit(batch):
        reward_N = sum(weight * x_N for weight, x_N in zip(weights, batch.rewards.values(), strict=True))
        return replace(batch, per_row={**batch.per_row, "reward": reward_N})

    finding = only(run_of("trl", steps_of(), rows=edit, options={"scale_rewards": scale}))
    assert finding.code == "RDA004"
    assert finding.cause.hypothesis.startswith("reward-weights")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("factor", "code"), [(0.0, "RDI014"), (2.0, "RDA004"), (-1.0, "RDA004")])
def test_the_coefficient_of_a_penalty(factor, code):
    def edit(objective):
        return replace(objective, kl_reward=replace(objective.kl_reward, coef=factor * objective.kl_reward.coef))

    finding = only(run_of("trl-rloo", steps_of(), objective=edit))
    assert finding.code == finding.cause.code == code
    assert "kl" in finding.cause.hypothesis


LOOK_ALIKES = {
    "clipped at the largest but one of a step": lambda batch, x: x.clamp(max=x.sort().values[-2].item()),
    "softly clipped": lambda batch, x: x.tanh(),
    "noise": lambda batch, x: x + 0.01 * torch.randn(len(x), generator=torch.Generator().manual_seed(batch.step)),
    "a cube": lambda batch, x: x**3,
    "other values": lambda batch, x: torch.randn(len(x), generator=torch.Generator().manual_seed(batch.step)).double(),
    "signs": lambda batch, x: x.sign(),
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", LOOK_ALIKES)
@pytest.mark.parametrize("binary", [False, True])
def test_look_alikes_have_no_cause(name, binary):
    if binary and name not in ("noise", "other values"):
        return  # two values lie on a line
    report = run_of("trl", steps_of(binary=binary), advantages=LOOK_ALIKES[name])
    assert "RDA004" in [one.code for one in report.findings]
    assert causes(report) == []


@pytest.mark.slow
@pytest.mark.parametrize("trainer", OPTIONS)
def test_runs_without_a_fault(trainer):
    for binary in (False, True):
        assert not run_of(trainer, steps_of(binary=binary)).findings


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("factor", [0.5, 5])
def test_the_coefficient_of_the_kl_is_one_number(factor):
    def edit(objective):
        return replace(objective, kl_loss=replace(objective.kl_loss, coef=factor * objective.kl_loss.coef))

    finding = only(run_of("trl", steps_of(), objective=edit))
    assert (finding.code, finding.cause.hypothesis) == ("RDG005", f"kl-loss-times-{factor:g}")


@pytest.mark.slow
def test_a_coefficient_that_differs_from_step_to_step_is_none():
    steps = iter((2.5, 3.5, 4.5))

    def metrics(values, evaluation):
        return {**values, "loss": evaluation.policy_loss + next(steps) * evaluation.kl_loss}

    report = run_of("trl", steps_of(), metrics=metrics)
    assert [one.code for one in report.findings] == ["RDG005"]
    assert causes(report) == []


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", ["trl", "verl"])
@pytest.mark.parametrize(("side", "value"), [("clip_high", 0.1), ("clip_low", 0.05)])
def test_the_clip_range_is_solved(trainer, side, value):
    def edit(objective):
        return replace(objective, surrogate=replace(objective.surrogate, **{side: value}))

    report = run_of(trainer, steps_of(), objective=edit)
    # The options that this contradicts are assumed.
    words = f"the ratio is clipped at {value:g} {'above' if side == 'clip_high' else 'below'} 1"
    assert ("RDI014", f"{side.replace('_', '-')}-is-{value:g}") in causes(report) or any(
        words in note for note in report.notes
    )


@pytest.mark.slow
def test_a_loss_that_some_clip_range_gives_in_one_step_has_no_cause():
    """A range of many digits says nothing: there is one for many losses."""

    def metrics(values, evaluation):
        return {**values, "loss": values["loss"] + 0.0123 * (evaluation.batch.step == 1)}

    report = run_of("trl", steps_of(), metrics=metrics)
    assert [(one.code, one.cause) for one in report.findings] == [("RDG005", None)]


@pytest.mark.slow
def test_an_entropy_bonus_that_is_not_subtracted_in_some_steps():
    def times(factor):
        def metrics(values, evaluation):
            more = (factor - 1) * evaluation.entropy_loss * (evaluation.batch.step == 1)
            return {**values, "loss": values["loss"] + more}

        return run_of("trl", batches, metrics=metrics, options=options)

    draw = torch.Generator().manual_seed(1)
    batches = [
        replace(
            batch,
            per_token={
                **batch.per_token,
                "entropy": torch.rand(batch.tokens, dtype=torch.float64, generator=draw).float().double(),
            },
        )
        for batch in steps_of()
    ]
    options = {"entropy_coef": 0.02}
    finding = only(times(-1))
    assert (finding.code, finding.cause.hypothesis) == ("RDG005", "entropy-bonus-flipped")
    assert finding.cause.steps == (1, 1, 1)
    assert [(one.code, one.headline) for one in times(0).findings] == [
        ("RDI014", "The loss has no entropy bonus, although a coefficient is recorded (3 of 3 logged values of loss)")
    ]
    # Another factor of it.
    assert causes(times(-0.7)) == []
    assert not times(1).findings


@pytest.mark.slow
def test_an_added_term_is_named_with_its_size():
    def metrics(values, evaluation):
        return {**values, "loss": values["loss"] + 0.01 * (1 + 0.05 * evaluation.batch.step)}

    finding = only(run_of("trl", steps_of(5), metrics=metrics))
    assert (finding.code, finding.cause.hypothesis) == ("RDG005", "added-term")
    assert "0.01 to 0.012 above" in finding.headline


@pytest.mark.slow
def test_a_factor_is_seen_beside_zeros():
    def metrics(values, evaluation):
        return {**values, "kl": 0.0 if evaluation.batch.step == 0 else 4 * values["kl"]}

    batches = steps_of(4)
    same = {**batches[0].per_token, "ref_log_probs": batches[0].per_token["policy_log_probs"]}
    report = run_of("trl", [replace(batches[0], per_token=same), *batches[1:]], metrics=metrics)
    assert ("RDM007", "metric-scaled") in causes(report)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("factor", [1 / 48, 1 / 8, 1 / 4, 1 / 2, 2, 4, 8, 48])
def test_a_factor_below_one_is_found_like_one_above(factor):
    """Both parts of the loss have it, and it is one finding."""

    def metrics(values, evaluation):
        return values | {name: factor * values[name] for name in ("actor/pg_loss", "actor/kl_loss")}

    finding = only(run_of("verl", steps_of(3), metrics=metrics))
    assert (finding.code, finding.cause.hypothesis) == ("RDM007", "metric-scaled")
    words = f"{factor} times what" if factor > 1 else f"divided by {round(1 / factor)}"
    assert words in finding.headline
    assert finding.cause.explains == ("actor/kl_loss", "actor/pg_loss")
    assert finding.headline.startswith("The logged actor/pg_loss and actor/kl_loss are")


def ratio_of_one(objective):
    return replace(objective, surrogate=replace(objective.surrogate, old="policy_log_probs"))


GRPO = {"beta": 0.0, "loss_type": "grpo"}


@pytest.mark.slow
def test_a_hypothesis_that_gives_0_in_every_step_is_accepted():
    """With a ratio of 1 the mean over rows of each row's mean advantage is 0 in every group."""
    finding = only(run_of("trl", steps_of(4), objective=ratio_of_one, options=GRPO))
    assert (finding.code, finding.cause.hypothesis, finding.cause.as_found) == ("RDO006", "ratio-is-one", 4)


@pytest.mark.slow
def test_a_0_in_some_steps_says_nothing():
    def metrics(values, evaluation):
        return values if evaluation.batch.step == 0 else {**values, "loss": 0.0}

    assert "RDO006" not in {code for code, _ in causes(run_of("trl", steps_of(4), metrics=metrics, options=GRPO))}


@pytest.mark.slow
def test_a_0_in_two_steps_says_too_little():
    assert not causes(run_of("trl", steps_of(2), objective=ratio_of_one, options=GRPO))


@pytest.mark.slow
def test_an_edit_leaves_metrics_that_it_does_not_claim():
    """TRL logs `reward` and `frac_reward_zero_std` before the baseline, whatever the groups are then."""
    batches = [replace(batch, rewards={}) for batch in steps_of()]
    reward_N = batches[0].per_row["reward"].clone()
    reward_N[3] = torch.nan
    missing = [replace(batches[0], per_row={**batches[0].per_row, "reward": reward_N}), *batches[1:]]

    def as_zero(batch):
        return replace(batch, per_row={**batch.per_row, "reward": batch.per_row["reward"].nan_to_num(0.0)})

    assert only(run_of("trl", missing, rows=as_zero)).code == "RDA005"


@pytest.mark.slow
def test_what_is_clipped_is_counted_beside_the_loss():
    def edit(objective):
        return replace(objective, surrogate=replace(objective.surrogate, clip_low=1e6, clip_high=1e6))

    own = iter(
        [configured("trl").trainer.metrics(evaluate(batch, configured("trl").objective)) for batch in steps_of()]
    )

    def metrics(values, evaluation):
        recorded = next(own)
        return {**values, **{name: float(recorded[name]) for name in values if name.startswith("clip_ratio")}}

    finding = only(run_of("trl", steps_of(), objective=edit, metrics=metrics))
    assert finding.cause.hypothesis == "not-clipped"


@pytest.mark.slow
def test_a_loss_that_follows_from_the_logged_advantages_is_no_second_fault():
    report = run_of("trl", steps_of(), advantages=LOOK_ALIKES["other values"])
    assert [one.code for one in report.findings] == ["RDA004"]
    assert not next(entry for entry in report.audit if entry.quantity == "loss").agrees


@pytest.mark.slow
def test_losses_of_zero_confirm_nothing():
    """Every loss is 0 within rounding: that follows from many formulas, and so from none."""
    report = run_of("trl", steps_of(), metrics=lambda values, evaluation: {**values, "loss": 0.0})
    assert causes(report) == []
