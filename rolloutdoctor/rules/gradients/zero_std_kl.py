"""RDG001: the gradient of zero-variance groups."""

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.adam_moment import shares_in_moment
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

FIX = "zero-std:loss"
FIXED = tuple(f"{FIX}/{name}" for name in ("grad_l1", "grad_sq", "versus_l1", "versus_dot"))
TOLD = ("told", "with_kl", "without_kl")
GROUP = (*STEP_KEY, "group")
SHARED = ("trained_tokens", "grad_l1", "grad_sq", "kl_loss", "logits", "logits_low")
"""Sums of which zero-variance groups have a share."""


class ZeroStdKl(TableRule):
    """Zero-variance groups still update the model through the KL term.

    ## What it does
    Finds training groups of two or more rows whose rewards are all equal (max - min = 0, never by a standard
    deviation) while the loss has a KL term, and measures how much of the gradient comes from them.

    ## Why it matters
    Their advantages are zero, so their only gradient is the KL term, which pulls the policy towards the reference.
    Upstream regards this as the published objective, which applies the KL to every token whatever the advantage. It is
    therefore reported as information with a magnitude, never as a fault.

    ## How it is measured
    The gradient is the exact derivative of the loss with respect to each logged log-prob, not to parameters.
    `grad_share_logits_l2` weighs it by the norm of the derivative of the log-prob with respect to the token's logits,
    which needs the column `sum_pi_squared`; without it the share is bounded from both sides. In trainings of tiny
    models the share of the parameters' gradient was 0.2 to 3 times the share by log-probs in nine of ten steps;
    `docs/how-we-know.md` says where they differ. `kappa` = <g, g_fixed> / <g_fixed, g_fixed>, where the fix masks the
    KL of such groups in the loss. Confirmed: the logged losses equal the objective with that KL term, and the one
    without it gives values more than two rounding radii off (if all equal that one, nothing is found); or, in a step
    where every group has equal rewards and all advantages are zero (as logged, or else recomputed in float32), the
    trainer logged a gradient norm above zero.

    ## What to do
    If the KL is not wanted there, filter such prompts before the update (dynamic sampling), vary the difficulty, or set
    beta = 0. The numbers compare with the fix `zero-std`.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 1], [1, 0]], policy=-1.0, ref=-1.5)
    >>> diagnose_one("RDG001", batch, trainer="trl", beta=0.1)
    'RDG001 info exposed: groups_share 0.5'
    """

    code = "RDG001"
    name = "zero-std-kl"
    rests_on = ("kl", "loss")
    fix = FIX
    references = (
        "https://github.com/huggingface/trl/issues/5588",
        "https://github.com/huggingface/trl/pull/5640",
        "https://arxiv.org/abs/2505.22257",
    )
    reads = ("zero_std", "score", "trained_tokens", "grad_l1", "grad_sq", "kl", "kl_loss", *FIXED)
    adds = ("logits", "logits_low")
    optional = ("grad_share_logits_l2", "grad_share_logits_l2_low", "grad_share_logits_l2_high")
    splits = ("train",)
    apart: float = 2.0
    """Factor between the shares by log-probs and by logits from which tokens of probability near 1 carry one side of
    the gradient. From there on that of the parameters' gradient was off that by log-probs on the side of that by logits
    in every step of the study."""
    blurred: float = 0.01
    """Share of their KL that float32 rounding may be, up to which a sentence says the KL."""
    uses = ("sum_pi_squared", "advantage", "advantages")
    """Make the logit-space share exact, and the confirmation stricter."""
    part_names = (Part.KL_LOSS,)

    def columns(self, context: Context) -> frozenset[str]:
        """Everything that the loss needs, if it has a KL term."""
        if context.objective is None or context.objective.kl_loss is None:
            return frozenset()
        return loss_columns(context.objective) | {"group_id"}

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Losses whose policy term moves such groups too."""
        mine = context.objective
        if mine is None or mine.kl_loss is None:
            return None
        if mine.entropy_bonus is not None:
            return Missing(
                f"these groups also get the entropy bonus's gradient: {mine.entropy_bonus.no_gradient}",
                mine.entropy_bonus.remedy,
            )
        if not mine.surrogate.moves_without_advantage:
            return None
        return Missing(
            "the policy term of this loss also moves tokens with advantage 0, so the KL term is not their only "
            "gradient",
            "compare with and without the KL term of these groups: `rolloutdoctor diff --fix zero-std`",
        )

    def metrics(self, context: Context) -> frozenset[str]:
        """The logged gradient norm, of which Adam's first moment is made."""
        return frozenset({context.trainer.log.grad_norm} if context.trainer is not None else ())

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The squared norm of the gradient with respect to the logits, and its lower bound."""
        tokens = step.tokens
        if tokens is None:
            return dict.fromkeys(self.adds)
        return {"logits": tokens.logits_sq_N, "logits_low": tokens.logits_low_sq_N}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Read from the log the gradient norm that only such groups can have, and the losses.

        `told` logged losses can distinguish the objective with the KL term of such groups from the one without.
        """
        trainer, rows = step.trainer, step.rows
        is_told = bool(step.logged) and step.fixed(FIX) is not None
        if trainer is None or rows is None or not is_told or not bool(rows.zero_std_N.any()):
            return {}
        kind_of, by_name = trainer.log.kind_of, step.told_by_quantity(FIX)
        # A logged KL of these groups says nothing of the gradient.
        counts = [count for name, count in by_name.items() if kind_of(name) in ("loss", "kl_loss")]
        sums = {name: sum(count[place] for count in counts) for place, name in enumerate(TOLD)}
        return sums | {"norm": self._logged_norm(step) if bool(rows.zero_std_N.all()) else None}

    def _logged_norm(self, step: "StepView") -> float | None:
        """Gradient norm logged at a step without any spread, if nothing but the KL term can explain it."""
        assert step.trainer is not None
        assert step.tokens is not None
        assert step.evaluation is not None
        norm = step.logged.get(step.trainer.log.grad_norm)
        if norm is None or not norm > 0 or bool((step.tokens.layout.steps_N > 1).any()):
            return None
        if not float(step.tokens.grad_l1_N.sum()) > 0:
            return None
        # A residue of rounding in the trainer's own advantages would be a gradient of its own.
        advantage_N, rule = step.logged_advantages(), step.evaluation.objective.advantage
        if advantage_N is None:
            is_scaled = rule.spec.is_standard_score and rule.scale == "group"
            advantage_N = step.float32_advantages(rule.epsilon) * is_scaled
        return None if bool((advantage_N.nan_to_num(0.0) != 0).any()) else norm

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the rows of each step with a gradient and over those of zero variance, and the groups of these."""
        dead, first = pl.col("zero_std"), pl.col("is_first")
        lines = rows.drop_nulls(["grad_l1", *FIXED]).with_columns(
            is_first=pl.int_range(pl.len()).over(GROUP) == 0,
            size=pl.len().over(GROUP),
            of_dead=dead.any().over(GROUP),
            of_step=pl.sum("grad_l1").over(STEP_KEY),
        )
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            pl.sum(*SHARED, *FIXED),
            **{f"dead_{name}": pl.col(name).filter(dead).sum() for name in SHARED},
            groups=first.sum(),
            dead_groups=(first & pl.col("of_dead")).sum(),
            rows=pl.len(),
            dead_rows=dead.sum(),
            dead_kl=pl.col("kl").abs().filter(dead).sum(),
            all_dead=dead.all(),
            inexact=pl.col("logits").null_count(),
            size=pl.max("size"),
        )
        groups = lines.group_by(GROUP, maintain_order=True).agg(
            pl.first("row", "group_id", "sample_id", "score", "of_step"), value=(pl.col("grad_l1") * dead).sum()
        )
        return with_places(sums, groups, context)

    def quantities(self) -> Mapping[str, Quantity]:
        """The shares of the gradient, and what the fix changes."""
        fixed_l1, fixed_sq, versus_l1, versus_dot = map(pl.sum, FIXED)
        is_exact = (pl.sum("inexact") == 0) & (pl.sum("rows") > 0)
        # The squared norm lies between one and two times (1 - p)^2 g^2, for each part on its own.
        of_dead = pl.sum("dead_logits_low")
        rest = pl.sum("logits_low") - of_dead
        lowest, highest = (of_dead / (of_dead + 2 * rest)).sqrt(), (2 * of_dead / (2 * of_dead + rest)).sqrt()
        return {
            "groups_share": (pl.sum("dead_groups") / pl.sum("groups"), "share"),
            "rows_share": (pl.sum("dead_rows") / pl.sum("rows"), "share"),
            "tokens_share": (_share("trained_tokens"), "share"),
            "grad_share_l1": (_share("grad_l1"), "share"),
            "grad_share_l2": (_share("grad_sq").sqrt(), "share"),
            "relative_change_l1": (versus_l1 / fixed_l1, "share"),
            "kappa": (versus_dot / fixed_sq, "1"),
            "cosine": (versus_dot / (pl.sum("grad_sq").sqrt() * fixed_sq.sqrt()), "1"),
            "kl_loss_share": (_share("kl_loss"), "share"),
            "grad_share_logits_l2": (pl.when(is_exact).then(_share("logits").sqrt()), "share"),
            "grad_share_logits_l2_low": (pl.when(~is_exact).then(lowest), "share"),
            "grad_share_logits_l2_high": (pl.when(~is_exact).then(highest), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Their reward, and what they have of the gradient."""
        share = percent(place["value"] / max(place["of_step"], 1e-300))
        return f"every reward is {place['score']:g}; {share} of the step's gradient (L1)"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No group that could have zero reward variance, or no token that it could train."""
        if not (run.table["size"] > 1).any():
            return "no training group has two or more responses"
        return None if run.table["trained_tokens"].sum() else "no token is trained"

    def _of_term(self, run: Measured, context: Context) -> str:
        """Say their share of the KL term, where it is more than rounding: small k3 terms cancel in float32."""
        from rolloutdoctor.ops import rounding

        assert context.objective is not None
        assert context.objective.kl_loss is not None
        size, tokens = run.table.select(pl.sum("dead_kl", "dead_trained_tokens")).row(0)
        radius = float(rounding.kl(context.objective.kl_loss.estimator, size, tokens))
        return f"{percent(run['kl_loss_share'])} of the KL term, " if radius <= self.blurred * size else ""

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information whenever such groups have a gradient at all."""
        table, steps = run.table, run.run.by_step("norm", *TOLD)
        told, with_kl, without_kl = map(int, steps.select(pl.sum(*TOLD)).row(0))
        # Where all values are those without it, the trainer masks the KL term of such groups already.
        if table["dead_grad_l1"].sum() == 0 or 0 < told == without_kl:
            return None
        alone = table.filter("all_dead", pl.col("grad_l1") > 0)
        groups, dead = table.select(pl.sum("groups", "dead_groups")).row(0)
        share, gradient = percent(run["groups_share"]), percent(run["grad_share_l1"])
        updates = counted(table["all_dead"].count(), "update")
        return Judgement(
            severity=Severity.INFO,
            confirmed=steps["norm"].count() > 0 or 0 < told == with_kl,
            headline=(
                f"{dead:,} of {counted(groups, 'group')} have equal rewards and still pull towards the reference: "
                f"{self._of_term(run, context)}{gradient} of the log-prob gradient"
            )
            + (f", and the whole gradient of {counted(len(alone), 'step')}" if len(alone) else ""),
            message=(
                f"{counted(dead, 'group')} of {groups:,} ({share}) have equal rewards; only their KL term has a "
                f"gradient, {gradient} of sum |dLoss/dlogp|{_of_logits(run, self.apart)}"
            )
            + (_of_adam(run, context, alone) if len(alone) else ""),
            evidence=_evidence(steps, int(table["all_dead"].sum()), context),
            advice=(
                "keep it if intended (a design choice upstream); otherwise filter these prompts or set the KL "
                "coefficient to 0; `rolloutdoctor diff --fix zero-std` shows the effect"
            ),
            remark=f"{len(alone):,} of {updates} came from the KL term alone, by design" if len(alone) else "",
        )


def _evidence(steps: pl.DataFrame, dead: int, context: Context) -> str:
    """Say what the log shows, given in how many steps every group has equal rewards."""
    told, with_kl = map(int, steps.select(pl.sum("told", "with_kl")).row(0))
    norms, every = steps["norm"].drop_nulls(), "every group has equal rewards"
    if len(norms):
        name = context.trainer.log.grad_norm if context.trainer else "grad_norm"
        return (
            f"in {counted(len(norms), 'step')} {every} and zero advantages, yet the logged {name} is above zero "
            f"(up to {number(max(norms))}): only the KL term moved the weights"
        )
    if 0 < told == with_kl:
        return (
            f"{with_kl:,} of {told:,} logged losses equal the objective with the KL term on such groups, and differ "
            "from the one without it by more than rounding"
        )
    if dead:
        return (
            f"in {counted(dead, 'step')} {every}, but no gradient norm above zero was logged there, or rounding may "
            "have made the advantages nonzero"
        )
    return "every step also has groups with reward variance, so no logged value isolates the KL term"


def _of_adam(run: Measured, context: Context, alone: pl.DataFrame) -> str:
    """Say what Adam makes of updates whose gradient is that of the KL alone, by the log where it can be told."""
    assert context.trainer is not None
    shares = shares_in_moment(run.run.by_step(context.trainer.log.grad_norm), context)
    known_shares = alone.join(shares, on=STEP_KEY).drop_nulls("share")["share"]
    if known_shares.is_empty():
        return (
            f"; Adam's momentum also carries gradients of earlier steps into {'that' if len(alone) == 1 else 'those'}"
        )
    middle, share = "" if len(known_shares) == 1 else "in the median ", percent(median(known_shares.to_list()))
    return (
        f"; of the gradient norms that Adam's first moment adds up there, {middle}{share} are the "
        "step's own, and the rest is of earlier steps"
    )


def _of_logits(run: Measured, apart: float) -> str:
    """Say how much of the gradient with respect to the logits it is, and where that tells of the parameters'."""
    exact, low, high = (run.values.get(f"grad_share_logits_l2{end}") for end in ("", "_low", "_high"))
    by_log_probs = run.values.get("grad_share_l2")
    low, high = (low, high) if exact is None else (exact, exact)
    if low is None or high is None or by_log_probs is None:
        return ""
    range_ = percent(high) if low == high else f"{percent(low)} to {percent(high)}"
    words = f", {range_} of the norm of the gradient with respect to the logits"
    if high * apart < by_log_probs:
        return f"{words}; their tokens are nearly certain: log-probs overstate their share of the parameters' gradient"
    if low > apart * by_log_probs:
        return f"{words}; the other tokens are nearly certain: log-probs understate this share of the parameters'"
    return words


def _share(name: str) -> pl.Expr:
    """Return the share of zero-variance groups in a sum."""
    return pl.sum(f"dead_{name}") / pl.sum(name)
