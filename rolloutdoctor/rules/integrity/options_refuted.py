"""RDI014: the log refutes an option."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.results.audit import Cause, Refuted
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedMeasured, CountedMeasured, CountingRule
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


class OptionsRefuted(CountingRule):
    """Logged values contradict an option that is recorded or given.

    ## What it does
    Before any arithmetic, compares the names and values in the log with the options: a KL above zero refutes a
    coefficient of zero, and a metric that only one setting logs refutes the others. After the audit, names the option
    whose other value gives the logged numbers: another estimator, scale or aggregation.

    ## Why it matters
    Every number in this report depends on the options. Where one is wrong, the numbers are those of another run. An
    option that was only assumed here refutes nothing: it is taken from the log where that tells its value, and else
    asked for, and what depends on it is left out.

    ## How it is measured
    The contradiction is a name or value in the log that is impossible under the option; or all logged values of a
    quantity that agree, within their rounding radii, with another value of the option and not with the recorded one; or
    responses with a `status` of length that have a trained token although a stated option says that none has. Clean: no
    name in the log is impossible, and no logged value disagrees; an option that changes nothing that was logged was not
    tested.

    ## What to do
    State the option that the run had with --set KEY=VALUE, or correct the file's metadata.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0]], ref=-1.3)
    >>> diagnose_one("RDI014", batch, trainer="trl", beta=0, logged={"kl": 0.05})
    'RDI014 error confirmed: values_compared 0'
    """

    code = "RDI014"
    name = "options-refuted"
    references = ("https://github.com/huggingface/trl/issues/2703",)
    stages = ("advantages", "kl", "loss", "metrics")
    needs_rows = False
    needs_objective = False
    unit = "rows"
    absent = "there are no rows of a training step, and no logged metric shows an option"

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Nothing logged, nothing refuted."""
        if self.judge(run, context) is not None:
            return None
        asked = self.questions(context)
        if asked:
            observation, _, remedy = asked[0].rpartition(": ")
            return Missing(observation, remedy)
        if context.refutable:
            return None
        return super().inconclusive_reason(run, context)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and how responses ended."""
        masks = {"status", "response_mask"} if self._masked_by(context) else frozenset()
        return super().optional_columns(context) | masks

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Count the responses that were cut off, and those of them with a trained token."""
        from rolloutdoctor.evaluation.response_ends import has_status

        if not step.batch.has("status", "response_mask") or not step.training:
            return {}
        cut_N = has_status(step.statuses, TRUNCATED, step.batch.device)
        shown_N = cut_N & (step.batch.trained.diff() > 0)
        return {"looked_at": int(cut_N.sum()), "shown": int(shown_N.sum())}

    def _masked_by(self, context: Context) -> str | None:
        """The stated option that masks responses that were cut off."""
        name = None if context.trainer is None else context.trainer.roles.truncation
        setting = None if name is None or context.config is None else context.config.settings.get(name)
        return name if setting is not None and setting.is_stated and setting.value is True else None

    def direct(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """An error where masks show that a stated option was not heeded."""
        name = self._masked_by(context)
        if name is None or not run.shown:
            return None
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"{name} = true had no effect: truncated responses are trained ({run.shown:,})",
            message=(
                f"{name} should mask every token of a truncated response, but {run.shown:,} of "
                f"{counted(run.looked_at, 'truncated response')} have trained tokens"
            ),
            evidence="the masks of rows whose status is length",
            advice="look for code that rebuilds the mask after the trainer cleared it",
        )

    def questions(self, context: Context) -> list[str]:
        """Ask for options that were only assumed, and of which the log shows another value."""
        questions = [refutation.words for refutation in context.refuted if refutation.assumed]
        for cause in context.causes.get(self.code, ()):
            names = _assumed_behind(cause, context)
            if names:
                questions.append(
                    f"{cause.words}: this reproduces {cause.as_found:,} of {cause.compared:,} logged {cause.quantity}, "
                    f"and nothing states {' or '.join(names)}: pass it with --set {names[0]}=VALUE"
                )
        return questions

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """An error: the run is not what its options say."""
        causes = tuple(cause for cause in context.causes.get(self.code, ()) if not _assumed_behind(cause, context))
        stated = _stated(context)
        if stated:
            first = stated[0]
            more = f" (and {len(stated) - 1} more)" if len(stated) > 1 else ""
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=f"the log contradicts the option {first.option} = {first.value}{more}",
                message="; ".join(refutation.words for refutation in stated),
                evidence=first.evidence,
                advice=f"pass the run's real option with --set {first.option}=VALUE, then check again",
            )
        all_causes = {**context.causes, self.code: causes}
        return super().judge(run, replace(context, causes=all_causes))


def _stated(context: Context) -> list[Refuted]:
    """Return the contradicted options that the run states; one that was only assumed contradicts nothing."""
    return [refutation for refutation in context.refuted if not refutation.assumed]


def _assumed_behind(cause: Cause, context: Context) -> tuple[str, ...]:
    """The options that a cause would contradict, where nothing states any of them: these refute nothing."""
    from rolloutdoctor.audit.step import stage_of

    if context.trainer is None or context.config is None:
        return ()
    choices, quantity = context.trainer.choices, cause.quantity.removesuffix(" (eval)")
    by_stage = {"advantages": choices.advantage, "kl": choices.kl, "loss": choices.loss}
    stage = quantity if quantity in by_stage else stage_of(context.trainer, quantity)
    names = tuple(dict.fromkeys(name for setting in by_stage.get(stage, ()) for name in setting))
    return names if all(context.config.settings[name].assumed for name in names) else ()
