"""RDG004: a logged loss that is the KL term and nothing else, from the trainer's log alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, logs_remedy, number, percent

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class KlOnlyTally(Sums):
    """What `kl-only-loss` adds up; all but `steps` is about steps whose logged loss is the KL term."""

    steps: int = 0
    kl_only: int = 0
    dead: int = 0
    with_norm: int = 0
    loss: float = 0.0
    kl_loss: float = 0.0
    grad_norm: float = 0.0
    worst: float = largest()


@dataclass(frozen=True)
class KlOnlyLoss(Rule[KlOnlyTally]):
    """The logged loss is the KL term alone: the curve shows drift from the reference, not learning.

    ## What it does
    Compares the logged loss with the logged KL times its coefficient. No rollouts are needed; if the run has them and
    they give the loss exactly, `RDG002` covers this case and this rule does not run.

    ## Why it matters
    At importance ratio 1 the policy term equals minus the mean advantage, which is 0 for centred advantages of equal
    weight. The printed loss is then beta times the KL: it starts at 0 and rises, although the policy gradient is not
    zero. So a falling loss is not progress, and a rising loss is not divergence.

    ## How it is measured
    TRL: `policy_loss` is the logged `loss` minus beta (which has to be given) times the logged `kl`. That difference is
    the policy part where TRL averages the KL in the loss over tokens as in the metric: `loss_type` dapo or bnpo on one
    micro-batch; elsewhere the two need not match, and the rule is silent unless they do. verl: `actor/pg_loss` is the
    policy part, and `actor/kl_loss` times `actor/kl_coef` the KL part. A step counts if the KL part is at least 1e-7
    and the policy part at most 1e-4 of it; a loss rounded to four digits (transformers before 5) is ignored below 0.5.
    Confirmed: it is what the trainer logged.

    ## What to do
    Nothing, if the logged gradient norm is not 0: watch reward and gradient norm instead of the loss.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> logged = {"loss": 9.192e-06, "kl": 2.298e-04, "grad_norm": 0.8}
    >>> diagnose_one("RDG004", toy_batch([[1, 0]]), trainer="trl", logged=logged, beta=0.04)
    'RDG004 info confirmed: steps_share 1'
    """

    code = "RDG004"
    name = "kl-only-loss"
    references = (
        "https://github.com/huggingface/open-r1/issues/239",
        "https://github.com/huggingface/trl/issues/2703",
    )
    tally = KlOnlyTally
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    negligible: float = 1e-4
    smallest_kl: float = 1e-7
    dead_warn_above: float = 0.1

    def columns(self, context: Context) -> frozenset[str]:
        """None: it is all in the log."""
        return frozenset()

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The KL term in the loss, unless the log shows it."""
        return () if self._told(context) else (Part.KL_LOSS,)

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rows that give the two parts of the loss exactly."""
        # The two log-probs stand in for each other.
        either = {"old_log_probs", "policy_log_probs"}
        held = context.columns | (either if either & context.columns else set())
        if context.objective is not None and loss_columns(context.objective) <= held:
            return "the rows give the loss exactly, so RDG002 covers it"
        return None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log from which the two parts of the loss cannot be told."""
        return None if self._told(context) else self._untold(context)

    def _told(self, context: Context) -> bool:
        trainer = context.writer
        names = dict.fromkeys(context.metrics, 0.0)
        return trainer is not None and trainer.loss_parts(names, context.config) is not None

    def _untold(self, context: Context) -> Missing:
        return Missing(
            "the log does not give the policy and the KL part of the loss",
            context.recording.get("loss_parts", f"name the trainer with --trainer NAME, and {logs_remedy()}"),
        )

    def measure(self, step: "StepView") -> KlOnlyTally:
        """Count one step."""
        logged = step.logged
        trainer = step.writer
        if trainer is None or not step.training:
            return KlOnlyTally()
        parts = trainer.loss_parts(logged, step.config)
        if parts is None or not abs(parts.policy) + abs(parts.kl) < float("inf"):
            return KlOnlyTally()
        if not (abs(parts.kl) >= self.smallest_kl and abs(parts.policy) <= self.negligible * abs(parts.kl)):
            return KlOnlyTally(steps=1)
        norm = logged.get(trainer.grad_norm_metric)
        return KlOnlyTally(
            steps=1,
            kl_only=1,
            dead=int(norm == 0),
            with_norm=int(norm is not None),
            loss=parts.policy + parts.kl,
            kl_loss=parts.kl,
            grad_norm=norm or 0.0,
            worst=abs(parts.policy),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The step itself."""
        tally = self.measure(step)
        if tally.kl_only:
            yield Example(step.batch.step, None, None, abs(tally.loss), f"loss {number(tally.loss)}, all of it KL")

    def measures(self, tally: KlOnlyTally) -> Mapping[str, Measure]:
        """Means over the steps in question."""
        return {
            "steps_share": Measure(ratio(tally.kl_only, tally.steps), "share"),
            "kl_only_steps": Measure(tally.kl_only, "steps"),
            "dead_steps": Measure(tally.dead, "steps"),
            "loss": Measure(ratio(tally.loss, tally.kl_only), "loss"),
            "kl_loss": Measure(ratio(tally.kl_loss, tally.kl_only), "loss"),
            "largest_policy_loss": Measure(tally.worst if tally.kl_only else None, "loss"),
            "grad_norm": Measure(ratio(tally.grad_norm, tally.with_norm), "parameter norm"),
        }

    def inconclusive_reason(self, run: KlOnlyTally, context: Context) -> Missing | None:
        """A log from which the two parts of the loss cannot be told."""
        return None if run.steps else self._untold(context)

    def judge(self, run: KlOnlyTally, context: Context) -> Judgement | None:
        """Information; a warning where the gradient is dead as well."""
        if not run.kl_only:
            return None
        share, dead_share = ratio(run.kl_only, run.steps), ratio(run.dead, run.steps) or 0.0
        found = {name: measure.value for name, measure in self.measures(run).items()}
        alive = f"the logged gradient norm is {number(found['grad_norm'])}" if run.with_norm else "no norm was logged"
        return Judgement(
            severity=Severity.WARNING if dead_share > self.dead_warn_above else Severity.INFO,
            confirmed=True,
            headline=f"the loss is the KL term alone in {counted(run.kl_only, 'step')} of {run.steps:,}",
            message=(
                f"in {percent(share)} of the steps the logged loss is the KL term: {number(found['loss'])} on average; "
                f"{alive}"
            ),
            evidence=(
                f"the logged policy part, or the loss minus coefficient times KL, is at most {number(run.worst)} there"
            ),
            advice=(
                f"{percent(dead_share)} of the steps had a gradient norm of 0 as well: no update"
                if run.dead
                else "no action: watch reward and gradient norm instead of the loss"
            ),
        )
