"""RDO012: sampler and trainer disagree, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logs_remedy, number
from rolloutdoctor.rules.numbers_rule import NumbersRule, logged, series, shown, step_at
from rolloutdoctor.rules.series import crossing
from rolloutdoctor.rules.table_rule import Measured

_LEVELS: Mapping[str, tuple[tuple[float, float, float], str]] = {
    "sampler_pearson": ((0.995, 0.9, 0.5), "a correlation of {}"),
    "sampler_gap": ((0.005, 0.1, 0.3), "a mean difference of {} in probability"),
    "sampler_logp_gap": ((0.02, 0.3, 1.0), "a mean difference of {} nats"),
    "sampler_k3": ((0.01, 0.1, 0.5), "a k3 of {} nats a token"),
    "sampler_ppl": ((0.05, 0.3, 1.0), "log-perplexities {} nats apart"),
}
"""Where information, a warning and an error begin, and what is said; of perplexities it is of their logarithms."""

_GAPS = tuple(_LEVELS)


class SamplerMismatchLogged(NumbersRule):
    """The logged comparison of sampler and trainer says that they are not the same policy.

    ## What it does
    Reads what the trainer logs of the train-inference mismatch: the correlation of probabilities, the mean difference
    of probabilities or log-probs, and the two perplexities.

    ## Why it matters
    Where the sampler serves other weights, another temperature or another tokenization than the trainer assumes, the
    responses are not from the policy whose gradient is taken.

    ## How it is measured
    Medians over the logged steps are tested. It is a warning if the correlation is below 0.9, the mean difference above
    0.1 in probability or above 0.3 nats, k3 above 0.1 nats, or log-perplexities are 0.3 nats apart; an error below 0.5,
    above 0.3, 1 nat, or a k3 of 0.5; in one line or two each is one severity lower. It is information beyond the gates
    that users often set: 0.995, 0.005, 0.02 nats, a k3 of 0.01. If a version lag of a step or more is logged, the
    training is asynchronous and a gap is expected: information. `onset` is the step from which a running median is
    beyond these gates. If the mean importance weight differs from 1 by more than three times sqrt(2 k3) + k3, and by
    more than 0.3, with a k3 below 0.02, the weights are those of whole sequences: a warning, from one line. A warning
    or an error is confirmed: the log proves that they differ, and not why; recorded rollouts show the cause (`RDO001`
    and others).

    ## What to do
    Compare the log-probs of one response under both; check temperature, chat template, precision, and that weights were
    synced (an adapter too).

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDO012", sampler_pearson=[0.047] * 12)
    'RDO012 error confirmed: sampler_pearson 0.047'
    """

    code = "RDO012"
    name = "sampler-mismatch-logged"
    references = ("https://github.com/volcengine/verl/issues/6806", "https://fengyao.notion.site/off-policy-rl")
    beside = (*_GAPS, "trainer_ppl", "version_lag", "is_weight")

    fewest: int = 3
    small_k3: float = 0.02
    least_apart: float = 0.3

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts with the sampler's log-probs, which say more."""
        compared = context.has_rows and "rollout_log_probs" in context.columns
        return "with rollouts RDO001 tests this" if compared else None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without any of them."""
        quantities = context.quantities
        if any(name in quantities for name in _GAPS) or {"is_weight", "sampler_k3"} <= quantities.keys():
            return None
        return Missing(
            "the log has no metric for the train-inference mismatch",
            context.recording.get("metrics", logs_remedy()),
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps, and none in which the weights contradict the gap."""
        import numpy as np

        is_short = len(run.table) < self.fewest
        if self._of_weights(run) is not None or (is_short and self.judge_few(run, context) is not None):
            return None
        if any(np.isfinite(series(run, name)).sum() >= self.fewest for name in _GAPS):
            return None
        return Missing(f"needs {self.fewest} steps that compare sampler and trainer", LONGER_LOG)

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

        least = min(self.fewest, len(run.table))
        is_logged = {
            name: np.isfinite(series(run, name)).sum() >= max(least, len(run.table) / 2) for name in self.beside
        }
        apart = {name: series(run, name) for name in _GAPS[:-1] if is_logged[name]}
        if is_logged["sampler_ppl"] and is_logged["trainer_ppl"]:
            apart["sampler_ppl"] = np.abs(np.log(series(run, "sampler_ppl") / series(run, "trainer_ppl")))
        exceeded: list[tuple[int, str, str]] = []
        for name, values in apart.items():
            levels, words = _LEVELS[name]
            median = float(np.nanmedian(values))
            count = sum(median < bound if _is_low(name) else median > bound for bound in levels)
            exceeded.append((count, words.format(number(median)), name))
        level, words, name = max(exceeded, key=lambda candidate: candidate[0], default=(0, "", ""))
        if not level:
            return None
        lag = logged(run, "version_lag")
        if lag is not None and np.median(lag) >= 1:
            level, words = 1, f"{words}, with a version lag of {number(float(np.median(lag)))} steps"
        finite = np.flatnonzero(np.isfinite(apart[name]))
        at = crossing(apart[name][finite], _LEVELS[name][0][0], below=_is_low(name))
        medians = {metric: float(np.nanmedian(series(run, metric))) for metric in (name, *apart)}
        return Judgement(
            severity=(Severity.INFO, Severity.WARNING, Severity.ERROR)[level - 1],
            confirmed=level > 1,
            headline=f"sampler and trainer disagree: {words}",
            message=f"In the median of {counted(len(run.table), 'logged step')} sampler and trainer have {words}.",
            evidence=(
                "the logged mismatch metrics; common alarm limits are correlation 0.995, probability difference "
                "0.005 and 0.02 nats"
            ),
            advice=(
                "compare one response's log-probs in both engines; check temperature, chat template, precision and "
                "the weight sync"
            ),
            measures={metric: Measure(value, "1") for metric, value in medians.items()}
            | ({} if at is None else {"onset": Measure(step_at(run, int(finite[at])), "step")}),
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Judge one line by its weights, enough by their medians."""
        return self._of_weights(run) or super().judge(run, context)

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge fewer lines than a median takes, one severity lower: one of them may be noise."""
        few = self.judge_log(run, context) if len(run.table) else None
        if few is None or few.severity == Severity.INFO:
            return None
        return replace(few, severity=Severity(few.severity - 1), remark=few.headline)

    def _of_weights(self, run: Measured) -> Judgement | None:
        """Judge a mean importance weight that ratios of tokens with the logged k3 cannot have.

        A token's log-ratio x has k3 = E[exp(x) - x - 1] >= E[x^2] / 2 up to third order, so that a mean weight is apart
        from 1 by no more than about sqrt(2 k3) + k3; truncation lowers it by less. Three times that is none of it.
        """
        import numpy as np

        weight, k3 = series(run, "is_weight"), series(run, "sampler_k3")
        is_valid = np.isfinite(weight) & np.isfinite(k3) & (k3 >= 0) & (weight > 0)
        if not is_valid.any():
            return None
        mean, gap = float(np.median(weight[is_valid])), float(np.median(k3[is_valid]))
        bound = 3 * (np.sqrt(2 * gap) + gap)
        if gap > self.small_k3 or abs(mean - 1) <= max(bound, self.least_apart):
            return None
        counts = f"down {1 / mean:.3g}-fold" if mean < 1 else f"up {mean:.3g}-fold"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"the mean importance weight is {number(mean)} although sampler and trainer differ by "
            f"only {number(gap)} nats a token: the weights are sequence-level, and scale the batch {counts}",
            message=f"Ratios of tokens with a k3 of {number(gap)} have a mean within {number(bound)} of 1; the logged "
            f"mean is {number(mean)}, as of products over whole responses.",
            evidence=f"the logged weight and k3 of {counted(int(is_valid.sum()), 'step')}",
            advice="use token-level importance weights, or divide each sequence's log-ratio by its length",
            measures={"onset": Measure(step_at(run, int(np.flatnonzero(is_valid)[0])), "step")},
        )


def _is_low(name: str) -> bool:
    """Tell whether low values are the bad ones."""
    return name == "sampler_pearson"
