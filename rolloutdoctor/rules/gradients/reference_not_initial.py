"""RDG012: the KL is not 0 before the first update: the reference is another model, from the log alone."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.training_kind import DISTILLATION
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.logged_quantities import by_step, not_logged
from rolloutdoctor.rules.measures.later_stage import is_later_stage
from rolloutdoctor.rules.measures.length_limit import stated_limit
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, series, step_at
from rolloutdoctor.rules.series import ends
from rolloutdoctor.rules.table_rule import Measured


class ReferenceNotInitial(NumbersRule):
    """The KL of the first step is as large as that of later ones, though nothing was updated before it.

    ## What it does
    Compares the logged KL of step 1 with that of the next steps.

    ## Why it matters
    Before the first update the policy is the model that training started from, so its KL to the right reference is 0. A
    KL from the reference that is not 0 then says that the reference is another one: the base below an adapter, another
    checkpoint, or the same in another precision, as TRL loads it before 1.16 beside a policy that was given a dtype.
    The KL term pulls the policy there.

    ## How it is measured
    `kl_at_start` is the logged KL of step 1. It is reported above 0.01 nats and above half of the median over the next
    five steps; above 0.05 nats if fewer than six steps are logged; above 0.3 nats if the trainer's KL of a step may be
    measured after updates within it (verl, slime), since one step does not move a policy that far. It is a warning
    above 0.3 nats, and information below, mentioned beside "no fault was found": another precision is as far. If the
    first line covers two to five steps, it is information above 0.3 nats, mentioned so if the learning rate of that
    line is below 1e-6. It is information, too, if the name of the file or of its folder says that the run is a later
    stage or was resumed: the policy was trained before. The rule reads a log without rollouts, and is skipped if the
    log starts later, as that of a resumed run does, if another run came before in the same log, and for distillation,
    whose reference is the teacher. A KL that is summed over a response (TRL's PPO, ``objective/kl``) is divided by the
    tokens of a response that are logged, else by the length limit that is stated, else by 500. Where nothing names
    that, a KL that ends below half of its start, in ten lines or more, is as one to a teacher, and the rule is skipped,
    too. Exposed: a reference may differ on purpose.

    ## What to do
    Check which weights the reference was loaded from; for an adapter on top of another, merge that one first. A second
    call of ``train()`` goes on with a policy that was trained, and explains the KL.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDG012", "trl", kl=[0.2, 0.21, 0.2, 0.22, 0.2, 0.2], beta=0.1)
    'RDG012 info exposed: kl 0.205'
    """

    code = "RDG012"
    name = "reference-not-initial"
    references = ("https://github.com/unslothai/unsloth/issues/4934",)
    about = ("kl",)
    beside = ("ppo_kl", "learning_rate", "response_kl", "response_length")

    fewest: int = 1
    few: int = 5
    floor: float = 0.01
    floor_of_few: float = 0.05
    far: float = 0.3
    falls: float = 0.5
    long: int = 10
    drift: float = 0.05
    tokens: float = 500.0
    """Of a response where neither the log nor an option says how many: more than PPO's examples sample."""

    still: float = 1e-6
    """Learning rate below which a few steps move no policy by `far`: Adam moves a weight by the rate at most."""

    widest: int = 5
    """Steps of the first line; a warmup that long has hardly begun."""

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts, which may be numbered apart from the log; a distillation, whose KL is to a teacher."""
        if context.training_kind == DISTILLATION:
            return "the reference of a distillation is its teacher, another model"
        return "tests logs without rollouts" if context.has_rows else None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without a KL."""
        return None if context.quantities.keys() & {"kl", "response_kl"} else not_logged(context, "kl")

    def watched(self, context: Context) -> tuple[str, ...]:
        """The KL of a token, and that of a response where the log has no other."""
        return self.about if "kl" in context.quantities else ("response_kl",)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """With the KL of a response over its tokens where the log has no other."""
        wide = by_step(run, context, (*self.about, *self.beside))
        if "kl" not in context.quantities:
            tokens = pl.coalesce("response_length", pl.lit(stated_limit(context) or self.tokens))
            wide = wide.with_columns(kl=pl.col("response_kl") / tokens)
        return wide.filter(pl.col("kl").is_finite()).sort("step")

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log that does not begin with the training, or may not."""
        if context.counted_steps:
            return Missing("the log says no step: its first line need not be the first step", "check a log with steps")
        if len(run.table) and not self._starts(run):
            return Missing(f"the log starts at step {step_at(run, 0)}", "check a log that starts with the training")
        if context.part and not context.part.startswith("run 1 "):
            return Missing("an earlier run of the log may have trained the policy", "check a run whose policy is new")
        level = ends(series(run, "kl")) if len(run.table) >= self.long else None
        if level is not None and level.first > self.floor and level.last < self.falls * level.first:
            way = from_to(level.first, level.last)
            return Missing(f"the KL falls {way} nats, as one to a teacher does", "name the metric after its teacher")
        return super().inconclusive_reason(run, context)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the first step with the next five, if there are five."""
        import numpy as np

        values, drift = series(run, "kl"), series(run, "ppo_kl")
        (quantity,) = self.watched(context)
        before = context.quantities[quantity][1].before_update and step_at(run, 0) <= 1
        first, later = float(values[0]), float(np.median(values[1:6])) if len(values) > 1 else 0.0
        floor = self.far if not before else self.floor if len(values) > self.few else self.floor_of_few
        if first <= floor or (len(values) > self.few and first <= later / 2):
            return None
        moved, last = "", step_at(run, 0)
        logged, of = series(run, quantity), "" if quantity == "kl" else " a response"
        start = f"{number(float(logged[0]))} nats{of}"
        rate = float(series(run, "learning_rate")[0])
        at_rate = f", at a learning rate of {number(rate)}" if last >= 2 and 0 <= rate < self.still else ""
        is_far = last < 2 and first > self.far and not is_later_stage(context.files)
        window = "step" if last < 2 else counted(last, "step")
        if abs(drift[0]) > self.drift:
            moved = f", and the update moves the log-probs by {number(float(drift[0]))} nats"
        headline = (
            f"the KL is {start} before the first update: the reference is not the initial model"
            if before
            else f"the KL is {start} in the first {window}{at_rate}{moved}: the reference"
            f"{', or the old log-probs, are from' if moved else ' is'} a different model"
        )
        return Judgement(
            severity=Severity.WARNING if is_far else Severity.INFO,
            confirmed=False,
            headline=headline,
            message=f"The KL from the reference is {start} at step {last}, "
            f"{'before any update' if before else 'more than so few updates do'}{moved}"
            + (f", and {number(float(np.median(logged[1:6])))} in the next steps" if len(values) > 1 else "")
            + ": the reference is not the model that the training started from.",
            evidence="the logged KL of the first step",
            advice=(
                "check which weights the reference was loaded from, unless the policy was trained before (a second "
                "call of train()); if you train a new adapter on an old one, merge the old one first"
            ),
            remark=headline if at_rate or (last < 2 and not is_far) else "",
            measures={"kl_at_start": Measure(float(logged[0]), "nats"), "onset": Measure(step_at(run, 0), "step")},
        )

    def _starts(self, run: Measured) -> bool:
        """Tell a log whose first line is of the first step, or of the first few, as its lines are that far apart."""
        first = step_at(run, 0)
        return first <= 1 or (first <= self.widest and len(run.table) > 1 and step_at(run, 1) == 2 * first)
