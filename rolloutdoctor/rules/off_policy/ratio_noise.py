"""RDO015: the importance ratio of a batch's only update is not 1, from the trainer's log alone."""

import polars as pl

from rolloutdoctor.metric_names.table import DIALECTS, whose
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logs_remedy, number, percent
from rolloutdoctor.rules.measures.pinned_ratio import pinned, several_updates, updates_of
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.table_rule import Measured

_PAIR = {"policy_log_probs", "old_log_probs"}
_UNSTATED = "nothing says how many updates a batch has"
_ADVICE = (
    "take the old log-probs from the loss's own forward pass, or score with the same micro-batches and temperature, "
    "without dropout"
)


class RatioNoise(NumbersRule):
    """Tokens are clipped, or the policy moves, in the only update of a batch.

    ## What it does
    Reads the logged clip fraction and the mean of old minus new log-probs where the options state one update per batch;
    where nothing states that, the clip fraction of the first optimizer step, before which nothing was updated.

    ## Why it matters
    Before the first update policy and old log-probs come from the same weights, so the ratio is 1 and nothing is
    clipped. What is clipped there is clipped at random, because the two forward passes differ: by the shapes of their
    batches in bf16, by the routing of a mixture of experts, by dropout, a temperature, or old log-probs of older
    weights.

    ## How it is measured
    `clip_fraction` and `ppo_kl` are means over the logged steps. If the trainer takes the old log-probs from the loss's
    own pass (TRL without vLLM) both are exactly 0: anything else is a warning, confirmed. If they come from another
    pass (vLLM in TRL, verl, slime), bf16 alone moves the ratio of 2 to 14 % of the tokens of models of 0.5 to 7 billion
    parameters, experts or not, by more than a tenth from 1, and of up to 60 % for older ones; in fp32 of none. So it is
    a warning above a clip fraction of 0.1 or a median drift of 0.01 nats, which noise without a direction does not
    reach, and information above 0.001 of either; exposed. A clip fraction is only information if clip bounds are below
    0.1, if ratios are of whole responses, and of the first step if nothing states the clip bounds: one above 0.1
    there (`first_clip_fraction`) is that of a ratio that is not 1. If rows have both log-probs, `RDO006` compares them.
    If the options state several updates per batch, a mean difference of exactly 0 in all of ten lines or more says that
    they do not move the ratio: a warning, exposed.

    ## What to do
    Take the old log-probs from the pass of the loss, or score with the micro-batches of the update; turn dropout off;
    replay the routing of experts; check that both passes have one temperature.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> once = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    >>> diagnose_log("RDO015", "trl", clip_fraction=[0.0, 0.01, 0.02], **once)
    'RDO015 warning confirmed: clip_fraction 0.01'
    """

    code = "RDO015"
    name = "ratio-noise"
    references = (
        "https://github.com/volcengine/verl/issues/6280",
        "https://github.com/google/tunix/pull/2061",
    )
    beside = ("clip_fraction", "ppo_kl")
    needs_objective = False
    needs_loss = True

    fewest: int = 3
    some: float = 1e-3
    many_clipped: float = 0.1
    far: float = 0.01
    fewest_pinned: int = 10

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rows with both log-probs, several updates a batch, or old log-probs that are the sampler's."""
        objective = context.objective
        if context.has_rows and context.columns >= _PAIR:
            return "with rollouts RDO006 tests this"
        if objective is not None and objective.surrogate.old == "rollout_log_probs":
            return "the ratio is against the sampler's log-probs"
        return None if "ppo_kl" in context.quantities else several_updates(context)

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Several updates a batch, which the ratio shows."""
        return several_updates(context)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Options that do not say, or a log without both."""
        updates = updates_of(context)
        if not isinstance(updates, int) and not _tells_first(context):
            how = "state them with --set: they give the number of updates per batch"
            return Missing(f"nothing states {updates}", how) if updates else Missing(_UNSTATED, context.unstated)
        if any(name in context.quantities for name in self.beside):
            return None
        return Missing("no known metric of this log holds a clip fraction or a log-prob drift", logs_remedy())

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps, or not the first one where that alone tells."""
        if isinstance(updates_of(context), int):
            return super().inconclusive_reason(run, context) if several_updates(context) is None else None
        if context.counted_steps or not len(run.table) or step_at(run, 0) > 1:
            return Missing(
                f"{_UNSTATED}, and the log does not say that it begins with the first step", context.unstated
            )
        return None

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Judge all steps where the options state one update a batch, or several, else the first."""
        if (several := several_updates(context)) is not None:
            return pinned(run, context, several, self.fewest_pinned)
        return super().judge(run, context) if isinstance(updates_of(context), int) else self._of_first(run)

    def _of_first(self, run: Measured) -> Judgement | None:
        """Information where tokens are clipped before the first update: nothing states the bounds."""
        share, step = float(series(run, "clip_fraction")[0]), step_at(run, 0)
        if not share > self.many_clipped:
            return None
        words = f"{percent(share)} of the tokens are clipped in step {step}, before the first update"
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=words,
            message=f"{words}, when policy and old log-probs come from the same weights",
            evidence="the trainer's log; with bounds of 1e-3 and below, as for ratios of whole responses, the noise of "
            "two forward passes is clipped, too",
            advice=_ADVICE,
            measures={"first_clip_fraction": Measure(share, "1"), "onset": Measure(step, "step")},
            remark=words,
        )

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps that are furthest off."""
        return table.with_columns(value=pl.max_horizontal("clip_fraction", pl.col("ppo_kl").abs()))

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare with 0 where both are exactly that, else with what noise reaches."""
        import numpy as np

        clipped, drift = (np.nan_to_num(np.abs(series(run, name))) for name in self.beside)
        share, far = float(clipped.mean()), abs(float(np.median(np.nan_to_num(series(run, "ppo_kl")))))
        trainer, config, objective = context.trainer, context.config, context.objective
        assert trainer is not None
        assert config is not None
        assert objective is not None
        is_exact = trainer.updates.single(config) and whose(context.metrics) not in DIALECTS
        is_narrow = objective.surrogate.level != "token" or objective.surrogate.clip_low < self.many_clipped
        if is_exact:
            severity = Severity.WARNING if clipped.any() or drift.any() else None
        elif far > self.far or (share > self.many_clipped and not is_narrow):
            severity = Severity.WARNING
        else:
            severity = Severity.INFO if max(share, far) > self.some else None
        if severity is None:
            return None
        words = f"{percent(share)} of the tokens are clipped" if share else ""
        if drift.any():
            words += f"{' and ' if words else ''}the log-probs move by {number(float(drift.mean()))} nats"
        expected = (
            "the trainer's ratio is exactly 1"
            if is_exact
            else ("the bf16 noise of two forward passes clips at most a few percent")
        )
        return Judgement(
            severity=severity,
            confirmed=is_exact,
            headline=f"{words} although each batch is updated only once",
            message=(
                f"in {counted(len(run.table), 'logged step')} {words}, although the options state one update per batch"
            ),
            evidence=f"the trainer's log; {expected}",
            advice=_ADVICE,
            measures={"onset": Measure(step_at(run, int((clipped + drift > 0).argmax())), "step")},
        )


def _tells_first(context: Context) -> bool:
    """Tell whether a log alone says how many tokens were clipped before the first update."""
    clip = context.quantities.get("clip_fraction")
    return clip is not None and clip[1].before_update and not context.has_rows
