"""RDO012: sampler and trainer disagree, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logs_remedy, number
from rolloutdoctor.rules.numbers_rule import NumbersRule, logged, series, shown
from rolloutdoctor.rules.table_rule import Measured

_GAPS = ("sampler_pearson", "sampler_gap", "sampler_logp_gap", "sampler_ppl")


@dataclass(frozen=True)
class SamplerMismatchLogged(NumbersRule):
    """The logged comparison of sampler and trainer says that they are not the same policy.

    ## What it does
    Reads what the trainer logs of the train-inference mismatch: the correlation of probabilities, the mean difference
    of probabilities or log-probs, and the two perplexities.

    ## Why it matters
    Where the sampler serves other weights, another temperature or another tokenization than the trainer assumes, the
    responses are not from the policy whose gradient is taken.

    ## How it is measured
    Medians over the logged steps. A warning: a correlation below 0.9, a mean difference above 0.1 in probability or
    above 0.3 nats, or log-perplexities that are 0.3 nats apart; an error below 0.5, above 0.3 or 1 nat. Information
    beyond what users often gate on: 0.995, 0.005, 0.02 nats. Where a version lag of a step or more is logged, the
    training is asynchronous and a gap is expected: information. Exposed; recorded rollouts tell the cause (`RDO001` and
    others).

    ## What to do
    Compare the log-probs of one response under both; check temperature, chat template, precision, and that weights were
    synced (an adapter too).

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDO012", sampler_pearson=[0.047] * 12)
    'RDO012 error exposed: sampler_pearson 0.047'
    """

    code = "RDO012"
    name = "sampler-mismatch-logged"
    references = ("https://github.com/volcengine/verl/issues/6806", "https://fengyao.notion.site/off-policy-rl")
    beside = (*_GAPS, "trainer_ppl", "version_lag")

    fewest: int = 3

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts with the sampler's log-probs, which say more."""
        compared = context.has_rows and "rollout_log_probs" in context.columns
        return "RDO001 compares the log-probs of the rollouts" if compared else None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without any of them."""
        if any(name in context.quantities for name in _GAPS):
            return None
        return Missing(
            "no metric that is known here compares sampler and trainer", context.recording.get("metrics", logs_remedy())
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps."""
        import numpy as np

        if any(np.isfinite(series(run, name)).sum() >= self.fewest for name in _GAPS):
            return None
        return Missing(f"needs {self.fewest} steps that compare sampler and trainer", "check a longer log")

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps of the largest gap, or of the lowest correlation."""
        gaps = pl.coalesce(1 - pl.col("sampler_pearson"), "sampler_gap", "sampler_logp_gap", 0.0)
        return table.with_columns(value=gaps)

    def note(self, place: Mapping[str, Any]) -> str:
        """What the step logged."""
        return ", ".join(shown(place, name) for name in _GAPS if place[name] is not None)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the medians with three levels."""
        import numpy as np

        known = {name: logged(run, name) for name in self.beside}
        medians = {name: float(np.median(values)) for name, values in known.items() if values is not None}
        found: list[tuple[int, str]] = []
        if "sampler_pearson" in medians:
            value = medians["sampler_pearson"]
            found.append((sum(value < level for level in (0.995, 0.9, 0.5)), f"a correlation of {number(value)}"))
        if "sampler_gap" in medians:
            value = medians["sampler_gap"]
            found.append(
                (
                    sum(value > level for level in (0.005, 0.1, 0.3)),
                    f"a mean difference of {number(value)} in probability",
                )
            )
        if "sampler_logp_gap" in medians:
            value = medians["sampler_logp_gap"]
            found.append(
                (sum(value > level for level in (0.02, 0.3, 1.0)), f"a mean difference of {number(value)} nats")
            )
        if medians.get("sampler_ppl", 0) > 0 and medians.get("trainer_ppl", 0) > 0:
            apart = abs(float(np.log(medians["sampler_ppl"] / medians["trainer_ppl"])))
            found.append(
                (sum(apart > level for level in (0.05, 0.3, 1.0)), f"log-perplexities {number(apart)} nats apart")
            )
        level, words = max(found, default=(0, ""))
        if not level:
            return None
        lag = medians.get("version_lag", 0.0)
        if lag >= 1:
            level, words = 1, f"{words}, with a version lag of {number(lag)} steps"
        return Judgement(
            severity=(Severity.INFO, Severity.WARNING, Severity.ERROR)[level - 1],
            confirmed=False,
            headline=f"sampler and trainer disagree: {words}",
            message=f"Sampler and trainer have {words}, in the median of {counted(len(run.table), 'logged step')}.",
            evidence="what the trainer logged; users often gate on 0.995, 0.005 and 0.02 nats",
            advice="compare one response's log-probs under both; check temperature, template, precision and the "
            "weight sync",
            measures={name: Measure(value, "1") for name, value in medians.items() if name in _GAPS},
        )
