"""RDT013: the response length fell, or the gradient norm rose, for good, from the trainer's log alone."""

from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, own_name
from rolloutdoctor.rules.logged_quantities import not_logged
from rolloutdoctor.rules.measures.longer_responses import longer_responses
from rolloutdoctor.rules.numbers_rule import NumbersRule, at_most, from_to, levels, logged, series, step_at
from rolloutdoctor.rules.series import Ends, ends, smoothed
from rolloutdoctor.rules.shift import shift
from rolloutdoctor.rules.table_rule import Measured


class LevelChange(NumbersRule):
    """The mean response length fell below a third of its start or grew by half, or the gradient norm rose to ten times.

    ## What it does
    Compares the logged response length and gradient norm at the end with those at the start.

    ## Why it matters
    Responses that shrink to a few tokens no longer reason or use tools: the policy learned that stopping early costs
    least. A gradient norm that stays at ten times its level says that the loss has another scale, or that the policy
    left the region in which it trained.

    ## How it is measured
    Medians over the first and the last tenth of the logged steps, at least three, of 20 or more, must differ by more
    than six standard errors of their noise; the length ends below a third of its start, the gradient norm above ten
    times. It is a warning; information if the reward rose meanwhile by six standard errors, too (the change paid off),
    unless the gradient norm ends above 50 times its start.
    `onset` is the first step from which the running median over a tenth of the steps stays beyond the geometric mean of
    both; of a steady change, that took more than a quarter of the steps, the first that left the old level.
    `truncated_last` is the share of responses that end truncated, if it is logged: short responses that are cut off
    have another limit. In a log without such a share (`RDT006`) a length of one and a half times its start, with a mean
    over the last third above that over the first by three standard errors, is information where the reward did not rise
    by two. Confirmed: the log shows that it happened, not why.

    ## What to do
    Read responses of both sides of the onset. For a length: does the reward pay for stopping early? For a gradient
    norm: look at the scale of the loss and of the rewards, and at entropy and KL at the onset.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT013", response_length=[900.0, 950.0] * 10 + [9.0, 10.0] * 10)
    'RDT013 warning confirmed: response_length 467.2'
    """

    code = "RDT013"
    name = "level-change"
    references = ("https://arxiv.org/abs/2503.20783",)
    beside = ("response_length", "grad_norm", "reward", "truncated_share")

    fewest: int = 20
    shrinks: float = 3.0
    grows: float = 10.0
    explodes: float = 50.0
    """Times a gradient norm at the start: such a norm is a warning whatever the reward did."""
    errors: float = 6.0
    half_again: float = 1.5
    errors_of_growth: float = 3.0
    bought: float = 2.0

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log with neither."""
        quantities = context.quantities
        either = "response_length" in quantities or "grad_norm" in quantities
        return None if either else not_logged(context, "response_length", "grad_norm")

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps."""
        if any((values := logged(run, name)) is not None and len(values) >= self.fewest for name in self.beside[:2]):
            return None
        return Missing(f"needs {self.fewest} steps with a logged response length or gradient norm", LONGER_LOG)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the length first."""
        import numpy as np

        for name, below in (("response_length", True), ("grad_norm", False)):
            values = logged(run, name)
            if values is None or len(values) < self.fewest:
                continue
            level = ends(values)
            if not self._changed(level, below=below):
                continue
            places = np.flatnonzero(np.isfinite(series(run, name)))
            # A line far from the others late in the run is none of the change.
            medians, middle = smoothed(values, level.count), (max(level.first, 1e-9) * max(level.last, 1e-9)) ** 0.5
            change = shift(medians, level.first, level.last, middle, level.noise)
            onset = step_at(run, int(places[change.at]))
            way = "fell" if below else "rose"
            change_words = change.words(f"{way} for good", way, onset)
            reward = levels(run, "reward")
            rose = reward is not None and reward.change > 0 and reward.errors > self.errors
            cut = levels(run, "truncated_share") if below else None
            most = "" if below else at_most(values, level.last)
            return self._judgement(
                name, change_words, level, onset, rose=rose, cut=cut, context=context, count=len(values), most=most
            )
        lengths = logged(run, "response_length")
        if "truncated_share" in context.quantities or lengths is None or len(lengths) < self.fewest:
            return None
        return longer_responses(run, context, self.half_again, self.errors_of_growth, self.bought)

    def _changed(self, level: Ends, *, below: bool) -> bool:
        """Tell whether a level changed by more than its noise and its factor."""
        low, high = (level.last, level.first) if below else (level.first, level.last)
        return low >= 0 < high and high > (self.shrinks if below else self.grows) * low and level.errors > self.errors

    def _judgement(
        self,
        name: str,
        change_words: str,
        level: Ends,
        onset: int,
        *,
        rose: bool,
        cut: Ends | None,
        context: Context,
        count: int,
        most: str,
    ) -> Judgement:
        title = BY_NAME[name].title
        advice = {
            "response_length": f"read responses before and after step {onset}, and check whether stopping early pays",
            "grad_norm": f"compare the scale of loss and rewards before and after step {onset}, and lower "
            f"{own_name(context, 'the learning rate')}",
        }
        unit = " tokens" if name == "response_length" else ""
        words = f"the {title} {change_words}: {from_to(level.first, level.last)}{unit}{most}"
        meanwhile = f"{words}{', while the reward rose' if rose else ''}"
        # What is so far away is no price of a gain.
        is_paid = rose and level.last <= self.explodes * level.first
        return Judgement(
            severity=Severity.INFO if is_paid else Severity.WARNING,
            confirmed=True,
            headline=words if is_paid else meanwhile,
            message=f"{meanwhile[:1].upper()}{meanwhile[1:]}.",
            remark=meanwhile if is_paid else "",
            evidence=f"medians over the first and the last {counted(level.count, 'step')} of {count:,}",
            advice=advice[name],
            why="" if name == "response_length" else _WHY_GRADIENT,
            measures={
                "level_first": Measure(level.first, BY_NAME[name].unit),
                "level_last": Measure(level.last, BY_NAME[name].unit),
                "onset": Measure(onset, "step"),
                **({} if cut is None else {"truncated_last": Measure(cut.last, "1")}),
            },
        )


_WHY_GRADIENT = (
    "A gradient norm that stays at ten times its level says that the loss has another scale, or that the policy left "
    "the region in which it trained."
)
