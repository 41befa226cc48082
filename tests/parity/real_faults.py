"""Every cause that `check` knows, planted into runs of the real code, and what comes of it as a table.

``python tests/parity/real_faults.py`` prints the table.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parity import real_edits as edits
from parity.real_patches import biased, biased_groups, trl_epsilon, trl_kl, verl_epsilon
from parity.real_rows import regrouped
from parity.real_runs import real_run
from parity.real_setup import SIZE, STEPS, WEIGHTS, Fault, Setup, Step
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.results.findings import Report
from rolloutdoctor.testing import diagnose

ACTOR = "actor_rollout_ref.actor"
MILD = (3,)
"""The steps of a mild fault; a severe one is in all six."""

SETUPS = {
    "verl": Setup(
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": True,
            "algorithm.use_kl_in_reward": False,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_type": "low_var_kl",
            f"{ACTOR}.kl_loss_coef": 0.05,
            f"{ACTOR}.loss_agg_mode": "token-mean",
            f"{ACTOR}.loss_scale_factor": 1,
            "trainer.use_v1": False,
        },
    ),
    "trl": Setup(
        "trl",
        {
            "num_generations": SIZE,
            "reward_weights": WEIGHTS,
            "loss_type": "dapo",
            "beta": 0.1,
            "use_bias_correction_kl": False,
        },
    ),
    "trl-rloo": Setup("trl-rloo", {"num_generations": SIZE, "reward_weights": WEIGHTS, "beta": 0.05}, drift=0.02),
}


@dataclass(frozen=True)
class Case:
    """A cause as it is planted.

    Attributes:
        names: hypotheses that are right, any of them.
        faults: trainer to the fault.
        setups: trainer to changes of its setup.
        unnamed: pairs of trainer and strength where only the audit finds it, to why; "" stands for any.
    """

    names: tuple[str, ...]
    faults: dict[str, Fault]
    setups: dict[str, dict] = field(default_factory=dict)
    unnamed: dict[tuple[str, str], str] = field(default_factory=dict)

    def expected(self, trainer: str, strength: str) -> str:
        """The outcome that is right."""
        keys = {(trainer, strength), ("", strength), (trainer, ""), ("", "")}
        return "only the audit" if keys & self.unnamed.keys() else "named"


def _everywhere(fault: Fault) -> dict[str, Fault]:
    return dict.fromkeys(SETUPS, fault)


def _misplaced_old(tokens: int) -> dict[str, Fault]:
    """The KL in RLOO's rewards is of the old log-probs, too."""
    moved = edits.shifted("old_log_probs", tokens)
    return {**_everywhere(Fault(update=moved)), "trl-rloo": Fault(scoring=moved, update=moved)}


def _grouped(index: Callable[[RolloutBatch], Tensor]) -> Fault:
    return Fault(scoring=lambda batch: regrouped(batch, index(batch)))


_FAR = Fault(record=edits.far_reference)

CASES: dict[str, Case] = {
    "groups by position": Case(
        ("groups-by-position",),
        {
            "verl": _grouped(lambda batch: edits.places(batch) // SIZE),
            "trl": Fault(record=edits.shuffled_groups),
            "trl-rloo": Fault(record=edits.shuffled_groups),
        },
    ),
    "groups tiled": Case(
        ("groups-tiled",),
        {
            "verl": _grouped(edits.tiled),
            "trl": Fault(order=edits.read_tiled),
            "trl-rloo": Fault(order=edits.read_tiled),
        },
    ),
    "group is the batch": Case(("group-is-batch",), _everywhere(_grouped(lambda batch: edits.places(batch) * 0))),
    "group is a row": Case(("group-is-row",), _everywhere(_grouped(edits.places))),
    "rewards one row late": Case(
        ("rewards-one-row-late",), _everywhere(Fault(scoring=edits.moved_rewards(edits.late)))
    ),
    "rewards sorted": Case(("rewards-sorted",), _everywhere(Fault(scoring=edits.moved_rewards(edits.by_reward)))),
    "rewards of eight rows late": Case(
        ("rewards-of-other-rows",), _everywhere(Fault(scoring=edits.moved_rewards(edits.few_late)))
    ),
    "missing reward as 0": Case(
        ("missing-reward-as-zero",), _everywhere(Fault(record=edits.unscored, scoring=edits.as_zero))
    ),
    "biased std": Case(("biased-std",), {"verl": Fault(patched=biased), "trl": Fault(patched=biased_groups)}),
    "another epsilon": Case(
        # Rewards that differ by whole numbers cannot tell 1e-6 from 0.
        ("epsilon-0", "epsilon-1e-06"),
        {"verl": Fault(patched=verl_epsilon), "trl": Fault(patched=trl_epsilon("trl", 1e-6))},
    ),
    "not divided by std": Case(
        ("scale-none", "group-mean-baseline"),
        {
            "verl": Fault(options={"algorithm.norm_adv_by_std_in_grpo": False}),
            "trl": Fault(options={"scale_rewards": "none"}),
        },
    ),
    "leave one out": Case(("leave-one-out",), {"verl": Fault(options={"algorithm.adv_estimator": "rloo"})}),
    "normalised over the rows": Case(("normalised",), {"trl-rloo": Fault(options={"normalize_advantages": True})}),
    "not normalised": Case(
        ("not-normalised",),
        {"trl-rloo": Fault(options={"normalize_advantages": False})},
        setups={"trl-rloo": {"normalize_advantages": True}},
    ),
    "old log-probs one token late": Case(("old-log-probs-one-token-late",), _misplaced_old(1)),
    "old log-probs one token early": Case(("old-log-probs-one-token-early",), _misplaced_old(-1)),
    "ref log-probs one token late": Case(
        ("ref-log-probs-one-token-late",),
        {
            "verl": Fault(update=edits.shifted("ref_log_probs", 1)),
            "trl": Fault(update=edits.shifted("ref_log_probs", 1)),
            "trl-rloo": Fault(scoring=edits.shifted("ref_log_probs", 1)),
        },
    ),
    "ref log-probs late, 0 first": Case(
        ("ref-log-probs-one-token-late-0-first",),
        {
            "verl": Fault(update=edits.shifted("ref_log_probs", 1, 0.0)),
            "trl": Fault(update=edits.shifted("ref_log_probs", 1, 0.0)),
        },
    ),
    **{
        f"KL is {name}": Case(
            (f"kl-loss-is-{name}",),
            {"verl": Fault(options={f"{ACTOR}.kl_loss_type": name}), "trl": Fault(patched=trl_kl(expression))},
        )
        for name, expression in (
            ("k1", "policy - ref"),
            ("k2", "0.5 * (policy - ref) ** 2"),
            ("abs", "(policy - ref).abs()"),
        )
    },
    "KL twice in the loss": Case(
        ("kl-loss-doubled",),
        {"verl": Fault(options={f"{ACTOR}.kl_loss_coef": 0.1}), "trl": Fault(options={"beta": 0.2})},
    ),
    "KL in reward and loss": Case(
        ("kl-in-reward-and-loss",),
        {
            "verl": Fault(
                options={
                    "algorithm.use_kl_in_reward": True,
                    "algorithm.kl_penalty": "k1",
                    "algorithm.kl_ctrl.kl_coef": 0.05,
                }
            )
        },
    ),
    "KL clamped": Case(
        ("kl-loss-clamped", "kl-loss-is-k3-clamped"),
        {
            "verl": replace(_FAR, update=edits.clamped(-sqrt(20), sqrt(20))),
            "trl": replace(_FAR, update=edits.clamped(-10.999983, edits.TEN)),
        },
        setups={"verl": {f"{ACTOR}.kl_loss_type": "k2"}},
    ),
    "loss by micro-batch": Case(
        ("loss-is-micro-batch-token-mean",),
        {"verl": Fault(options={"by_micro_batch": True}), "trl": Fault(options={"loss_type": "bnpo"})},
    ),
    "loss is a mean of rows": Case(
        ("loss-is-seq-mean-token-mean", "loss-is-micro-batch-row-mean"),
        {
            "verl": Fault(options={f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
            "trl": Fault(options={"loss_type": "grpo"}),
        },
    ),
    "denominator counts dropped rows": Case(
        ("denominator-counts-rejected-tokens",),
        {"verl": Fault(items=edits.generated), "trl": Fault(items=edits.generated)},
        setups={"verl": {"rejected": 0.2}, "trl": {"mask_truncated_completions": True}},
    ),
    "metric times 3": Case(
        ("metric-scaled",),
        {
            "verl": Fault(log=edits.times("actor/kl_loss", 3)),
            "trl": Fault(log=edits.times("kl", 3)),
            "trl-rloo": Fault(log=edits.times("kl", 3)),
        },
        unnamed={("trl-rloo", "mild"): "one value whose radius is wide beside it fits many factors"},
    ),
    "metric is a mean of rows' means": Case(
        ("metric-is-mean-of-rows", "drift-metric-is-mean-of-rows"),
        {"verl": Fault(log=edits.of_every_row("actor/ppo_kl")), "trl": Fault(log=edits.of_every_row("kl"))},
    ),
    "metric is a token mean": Case(
        ("metric-is-token-mean",),
        {"verl": Fault(log=edits.of_all_tokens("actor/ppo_kl")), "trl": Fault(log=edits.of_all_tokens("kl"))},
        unnamed={("trl", "mild"): "one value of 108 radii from what the options give says less than 8 bits"},
    ),
    "ratio against the sampler": Case(
        ("ratio-against-sampler",), _everywhere(Fault(update=edits.column_for("old_log_probs", "rollout_log_probs")))
    ),
    "ratio is one": Case(
        ("ratio-is-one",), _everywhere(Fault(update=edits.column_for("old_log_probs", "policy_log_probs")))
    ),
}


def setup_of(case: Case, trainer: str) -> Setup:
    """The setup in which a cause is planted."""
    setup = SETUPS[trainer]
    changes = dict(case.setups.get(trainer, {}))
    own = {name: changes.pop(name) for name in ("rejected", "unscored") if name in changes}
    return replace(setup, options={**setup.options, **changes}, **own)


def checked(setup: Setup, made: list[Step]) -> Report:
    """What `check` says of a run."""
    rows, logged = zip(*made, strict=True)
    return diagnose(rows, trainer=setup.trainer, options=setup.options, logged=logged)


def planted(case: Case, trainer: str, strength: str) -> Report:
    """What `check` says of a run with a cause in all of its steps, or in one."""
    setup = setup_of(case, trainer)
    at = range(STEPS) if strength == "severe" else MILD
    return checked(setup, real_run(setup, case.faults[trainer], at))


def outcome(case: Case, report: Report) -> tuple[str, str]:
    """One of "named", "other name", "only the audit" and "silent", and what was named or what disagrees."""
    causes = [finding.cause for finding in report.findings if finding.cause is not None]
    found = {name for cause in causes for name in (cause.hypothesis, *cause.also)}
    found |= {name for entry in report.audit for name in entry.with_fixes}
    if found & set(case.names):
        return "named", ", ".join(cause.hypothesis for cause in causes)
    if found:
        return "other name", ", ".join(sorted(found))
    off = [entry.quantity for entry in report.audit if not entry.agrees]
    return ("only the audit", ", ".join(off)) if off else ("silent", "")


def table() -> str:
    """The outcomes as Markdown: cause by trainer and strength."""
    lines = ["| cause | trainer | severe: every step | mild: one step of six |", "| --- | --- | --- | --- |"]
    for name, case in CASES.items():
        for trainer in case.faults:
            cells = []
            for strength in ("severe", "mild"):
                word, what = outcome(case, planted(case, trainer, strength))
                cells.append(word if word in ("named", "silent") and "," not in what else f"{word} ({what})")
            lines.append(f"| {name} | {trainer} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(table())
