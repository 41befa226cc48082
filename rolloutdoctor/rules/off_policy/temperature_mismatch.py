"""RDO003: log-probs of sampler and trainer at different temperatures."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent, sampling_option
from rolloutdoctor.rules.measures.named_values import total, totals
from rolloutdoctor.rules.measures.slope_bins import Slopes, common_factor, slopes, slopes_of
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


POLICY = "policy_log_probs"
"""Those of the pass that gave the entropy."""

MOVED = 0.02
"""Share of the entropy by which the policy of an update may differ from the one that was sampled from."""


class TemperatureMismatch(TableRule):
    """Sampler and trainer score at different temperatures, or tokens were drawn at another one.

    ## What it does
    Compares tokens that siblings drew at one context: the first token of the rows of a group, and further ones where
    `response_ids` show that the rows begin alike. There the difference of two log-probs is that of two logits over the
    temperature, so that (s_i - s_j) / (o_i - o_j) is the trainer's temperature over the sampler's.

    ## Why it matters
    An importance ratio of two temperatures is wrong on every token: 2.0 on the first one at 0.6 upstream. KL, clip and
    every correction for the mismatch then work on that, and entropy is pushed up or down step by step.

    ## How it is measured
    A slope over all tokens does not show it: each context has a normaliser of its own, which pulls the slope to 1 (a
    temperature of 0.7 gave 1.10, where 1.43 was right). Within a context it cancels. `slope` is the median over
    contexts of the slope of the sampler's log-probs s on the trainer's o (the nearest line, so that noise of both
    weighs the same), with its 95 % interval from order statistics; `temperature` is its inverse, the sampler's in units
    of the trainer's. Contexts count if their tokens are a nat apart, among the first 16 tokens of each row, in rows of
    the newest version of their step. A finding requires that the median is 0.02 or more from 1, four standard
    deviations exclude 1, nine tenths of the contexts are on its side and four fifths within a fifth of it: noise, stale
    weights, mixtures of experts and placeholders scatter to both sides. A truncated support (top-p, top-k, min-p) has
    slope 1 in a context. The rule needs 20 contexts, and for clean four standard deviations within 5 % of 1. It is a
    warning from 5 %, or if the recorded temperature lies in the interval, which confirms it; information below. If all
    log-probs of the run differ by one factor, they are logarithms to another base, and the finding says so.

    The second test is calibration, if `entropy` is logged: for tokens drawn from p the mean of -log p is the mean
    entropy. `surprise_share` = mean of -log p of the trainer over the mean entropy, less 1. With slope 1, a
    deviation of six standard errors and a tenth of the entropy, and of five times the mean difference of both
    log-probs, says that tokens were drawn from
    neither reported distribution: the engine returns log-probs of the model as it is, and samples at another
    temperature or from a truncated support. With another slope, it says whose log-probs are those that were sampled
    from. It needs no log-probs of the sampler: without these it is the only test, on rows of the first update of each
    step, and if old log-probs are recorded, on those from which the policy has moved by at most a fiftieth of the
    entropy: later passes over a generation, which may have steps of their own, score it with a policy that did not draw
    it.

    ## What to do
    Score at the temperature that was sampled at: divide the trainer's logits by it, and let the engine return
    processed log-probs (vLLM: `logprobs_mode=processed_logprobs`).

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> old = [[-0.5 - 0.3 * row] for row in range(8)] * 20
    >>> rollout = [[2 * each[0] + 0.2] for each in old]
    >>> batch = toy_batch([[0] * 8] * 20, lengths=1, policy=old, rollout=rollout)
    >>> diagnose_one("RDO003", batch, trainer=None)
    'RDO003 warning exposed: slope 1.994'
    """

    code = "RDO003"
    name = "temperature-mismatch"
    references = (
        "https://github.com/huggingface/trl/issues/4159",
        "https://github.com/huggingface/trl/pull/3029",
        "https://github.com/NVIDIA-NeMo/RL/pull/935",
    )
    needs_objective = False
    splits = ("train",)

    least_contexts: int = 20
    least_slope: float = 0.02
    """Below it a ratio is off by less than a kernel's noise."""
    warn_from: float = 0.05
    least_deviations: float = 6.0
    least_excess: float = 0.1
    """A policy that sharpens within its staleness moves the entropy by parts of this."""

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs and which rows answer one prompt, or the trainer's and its entropy."""
        columns = context.columns
        if "entropy" in columns and "rollout_log_probs" not in columns:
            return frozenset({POLICY, "entropy"})
        return frozenset({"rollout_log_probs", "old_log_probs", "group_id"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, the ids and prompts that make contexts, version stamps, and the entropy."""
        prompts = {"prompt_ids"} if "prompt_ids" in context.columns else {"prompt"}
        return frozenset(
            {"response_mask", "response_ids", "entropy", "policy_version_min", "policy_version_max", *prompts}
            | {"old_log_probs", "optim_step_id"}
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """The first tokens of each row."""
        from rolloutdoctor.rules.measures.contexts import first_tokens

        return first_tokens(block)

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Count the slopes of each step, and how its tokens fit the entropy."""
        from rolloutdoctor.rules.measures.calibration import calibration, unmoved

        columns, sample = steps.batch.per_token, steps.sample()
        is_alone = "rollout_log_probs" not in columns and "entropy" in columns
        alone = steps.sample(("old_log_probs" if "old_log_probs" in columns else POLICY, POLICY)) if is_alone else None
        if alone is not None:
            fits = calibration(unmoved(alone, MOVED), steps.fresh_N, steps.batch.first_part_N)
            return steps.values(tokens=alone.tokens_by_step.size, **fits)
        if sample is None:
            return steps.nothing(dict)
        sampler_sq, trainer_sq = sample.squares
        return steps.values(
            slope=steps.slopes(self.code),
            tokens=sample.tokens_by_step.size,
            gap=sample.tokens_by_step.sum(sample.apart),
            own=sampler_sq,
            other=trainer_sq,
            product=sample.product,
            **calibration(sample, steps.fresh_N),
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """The slope, what it says of the temperature, and calibration."""
        slope = slopes()
        return {
            "slope": (slope["middle"], "1"),
            "slope_low": (slope["low"], "1"),
            "slope_high": (slope["high"], "1"),
            "temperature": (1 / slope["middle"], "1"),
            "contexts": (slope["contexts"].fill_null(0), "contexts"),
            "surprise_share": (total("surprise") / total("entropy"), "share"),
            "surprise_deviations": (total("surprise") / total("surprise_square").sqrt(), "standard errors"),
            "mean_entropy": (total("entropy") / total("calibrated"), "nats"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few contexts, or too noisy ones."""
        if self._is_scaled(slopes_of(run.table)) or self._is_drawn_otherwise(run):
            return None
        if "rollout_log_probs" in context.columns:
            contexts, needed = run.count("contexts"), self.least_contexts
            return (
                None
                if contexts >= needed
                else Missing(
                    f"responses continue differently at {counted(contexts, 'shared context')}; needs {needed}",
                    "widen --steps, or record response_ids, which show further contexts that siblings share",
                )
            )
        square, entropy, calibrated = totals(run.table, "surprise_square", "entropy", "calibrated")
        # A temperature that moves the entropy by a tenth would show in so many standard errors.
        if square and self.least_deviations * sqrt(square) <= self.least_excess * entropy:
            return None
        few = f"{counted(calibrated, 'token')} with a logged entropy are too few to tell"
        return Missing(few, "widen --steps, or record rollout_log_probs")

    def excluded(self, run: Measured, context: Context) -> Excluded | None:
        """Bound the difference of the sampler's temperature from the trainer's, or of -log p from the entropy."""
        slope = slopes_of(run.table)
        if "rollout_log_probs" in context.columns and slope is not None:
            return Excluded(
                code=self.code,
                effect="a difference of the temperatures",
                bound=max(slope.highest - 1, 1 - slope.lowest),
                unit="as a share",
                estimate=abs(slope.middle - 1),
                limit=self.warn_from,
                seen=slope.contexts,
                of="contexts that siblings share",
            )
        size = abs(run["surprise_share"] or 0.0)
        square, entropy, calibrated = totals(run.table, "surprise_square", "entropy", "calibrated")
        return Excluded(
            code=self.code,
            effect="a difference of -log p and entropy",
            bound=size + reach(sqrt(square) / entropy if entropy else 0.0, int(calibrated)),
            unit="as a share",
            estimate=size,
            limit=self.least_excess,
            seen=int(calibrated),
            of="tokens with a logged entropy",
        )

    def _is_scaled(self, slope: Slopes | None) -> bool:
        return slope is not None and slope.contexts >= self.least_contexts and slope.is_scaled(self.least_slope)

    def _is_drawn_otherwise(self, run: Measured) -> bool:
        """True if tokens follow neither reported distribution, though both are the same."""
        deviations, excess = run["surprise_deviations"], run["surprise_share"]
        gap, tokens, surprise, calibrated = totals(run.table, "gap", "tokens", "surprise", "calibrated")
        if deviations is None or excess is None or not calibrated:
            return False
        far = abs(deviations) >= self.least_deviations and abs(excess) >= self.least_excess
        # Where the two log-probs differ as much, the difference is for other rules.
        return far and abs(gap) / tokens < 0.2 * abs(surprise) / calibrated

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning from a twentieth on, or where the recorded temperature is the one found, which confirms it."""
        slope, stated = slopes_of(run.table), sampling_option(context, "temperature")
        if slope is not None and self._is_scaled(slope):
            return self._scaled(run, slope, stated)
        return self._drawn_otherwise(run, context, stated) if self._is_drawn_otherwise(run) else None

    def _scaled(self, run: Measured, slope: Slopes, stated: float | None) -> Judgement:
        ratio, base = 1 / slope.middle, common_factor(*totals(run.table, "own", "other", "product"))
        interval = f"{1 / slope.high:.3g} to {1 / slope.low:.3g}"
        matches = stated is not None and stated != 1 and slope.low <= 1 / stated <= slope.high
        inverse = stated is not None and stated != 1 and slope.low <= stated <= slope.high
        if base is not None:
            whose = f"every sampler log-prob is {base:.4g} times the trainer's: a logarithm to another base"
        elif matches:
            whose = f"the sampler's are at the recorded temperature {stated:g}, the trainer's at 1"
        elif inverse:
            whose = f"the trainer's are at the recorded temperature {stated:g}, the sampler's are raw ones, at 1"
        else:
            whose = self._whose(run)
        return Judgement(
            severity=Severity.WARNING
            if matches or inverse or abs(slope.middle - 1) >= self.warn_from
            else Severity.INFO,
            confirmed=matches or inverse,
            headline=(
                f"the sampler's log-probs are at {ratio:.3g} times the trainer's temperature (95 % interval {interval})"
            ),
            message=(
                f"at {counted(slope.contexts, 'context')} that responses share, differences between the sampler's "
                f"log-probs are {slope.middle:.3g} times the trainer's (95 % interval {slope.low:.3g} to "
                f"{slope.high:.3g}): a temperature of {ratio:.3g} times the trainer's; {whose}"
            ),
            evidence=(
                f"{percent(slope.one_sided)} of the contexts lie on the same side of 1, {percent(slope.near)} within "
                "a fifth of that factor; only a temperature does that, not noise or truncated sampling"
            ),
            advice=(
                "score at the sampling temperature, and let the engine return processed log-probs (vLLM: "
                "logprobs_mode=processed_logprobs)"
            ),
        )

    def _whose(self, run: Measured) -> str:
        """Name the model whose log-probs are those of the distribution that was sampled from."""
        deviations, excess = run["surprise_deviations"], run["surprise_share"] or 0.0
        if deviations is None:
            return "with the column `entropy` the report could name the wrong side"
        if abs(deviations) >= 4:
            return (
                f"-log p of the trainer is {percent(abs(excess))} "
                f"{'above' if deviations > 0 else 'below'} its entropy, so its distribution is not the one "
                "sampled from"
            )
        return "the trainer's mean -log p fits its entropy, so the sampler's log-probs do not belong to its draws"

    def _drawn_otherwise(self, run: Measured, context: Context, stated: float | None) -> Judgement:
        share = run["surprise_share"] or 0.0
        above, alone = share > 0, "rollout_log_probs" not in context.columns
        cause = "a higher temperature" if above else "a lower temperature (or with top-p, top-k, min-p)"
        is_other = stated is not None and stated != 1
        agree, whose = ("", "the") if alone else ("sampler and trainer agree, but ", "both")
        (calibrated,) = totals(run.table, "calibrated")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=stated is not None and is_other and above == (stated > 1),
            headline=f"tokens were sampled at {cause} than {whose} log-probs assume",
            message=(
                f"{agree}the mean of -log p is {percent(abs(share))} {'above' if above else 'below'} the mean entropy: "
                f"tokens were sampled at {cause}, but {whose} log-probs are the raw model's"
            )
            + (f"; the recorded temperature is {stated:g}" if is_other else ""),
            evidence=f"{number(run['surprise_deviations'])} standard errors over {counted(calibrated, 'token')} with a "
            "logged entropy",
            advice="let the engine return processed log-probs, and divide the trainer's logits by the temperature",
        )
