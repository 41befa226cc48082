"""RDT006: responses grow into the length limit, from the trainer's log alone."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, own_name, percent
from rolloutdoctor.rules.measures.longer_responses import longer_responses, rose
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, levels, logged, series, step_at
from rolloutdoctor.rules.series import OF_A_MEDIAN, crossing, ends
from rolloutdoctor.rules.table_rule import Measured


class LengthGrowth(NumbersRule):
    """Responses grew until most of them were cut off at the length limit.

    ## What it does
    Compares the logged share of truncated responses, and their mean length, at the start and at the end.

    ## Why it matters
    A truncated response has no answer to score. Where length and truncation rise together, the policy learned to write
    on, and the rewards of the run are those of the cap.

    ## How it is measured
    `truncated_first` and `truncated_last` are medians over the first and the last tenth of the logged steps, at least
    three. A finding is a growth by more than 0.3 and three standard errors, with a mean length that did not fall. Since
    a share wanders for some steps at a time, the errors count noise that lasts, and unless it ends above 0.95, its mean
    over the last third has to be above that over the first by three standard errors, too. It is information; a warning
    if the share ends above 0.4, or the mean length above five times its start, and the reward did not rise
    by two standard errors between the thirds; an error above 0.95. With such a length a growth by 0.15 is a finding.
    `onset` is the first step from which the running median stays above the middle of both. Without such truncation, a
    mean length of one and a half times its start or more, above its noise, is information where the reward is logged
    and did not rise by two standard errors. Confirmed.

    ## What to do
    Raise the length limit, penalize length beyond a budget, or mask truncated responses; look at whether the reward
    pays for length.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT006", truncated_share=[0.05 * step for step in range(20)], response_length=range(50, 70))
    'RDT006 warning confirmed: truncated_share 0.475'
    """

    code = "RDT006"
    name = "length-growth"
    references = ("https://arxiv.org/abs/2503.20783",)
    about = ("truncated_share",)
    beside = ("response_length", "reward")

    many: float = 0.4
    growth: float = 0.3
    some: float = 0.15
    longer: float = 5.0
    nearly_all: float = 0.95
    half_again: float = 1.5
    """Times the mean length at the start: above it the length of a run is another than that of its first steps."""
    errors: float = 3.0
    """Standard errors of the two medians, and of the means of thirds: of steps of few responses the share is noise."""
    bought: float = 2.0
    """Standard errors of a reward that moved (`RDT016`): longer responses that earn more are no fault yet."""

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the end with the start."""
        values = series(run, "truncated_share")
        level = ends(values)
        length = levels(run, "response_length")
        is_noise = level.change <= self.errors * OF_A_MEDIAN * level.error_with_memory
        is_longer = length is not None and length.last > self.longer * length.first > 0
        growth = self.some if is_longer else self.growth
        if level.change <= growth or is_noise or (length is not None and length.change < 0):
            return longer_responses(run, context, self.half_again, self.errors, self.bought)
        is_whole = level.last > self.nearly_all
        if not is_whole and not rose(values, self.errors):
            return longer_responses(run, context, self.half_again, self.errors, self.bought)
        rewards = logged(run, "reward")
        is_bought = rewards is not None and rose(rewards, self.bought)
        at = crossing(values, (level.first + level.last) / 2, below=False)
        onset = step_at(run, len(values) - 1 if at is None else at)
        words = f"; the mean length went {from_to(length.first, length.last)} tokens" if length else ""
        return Judgement(
            severity=Severity.ERROR
            if is_whole
            else Severity.WARNING
            if (level.last > self.many or is_longer) and not is_bought
            else Severity.INFO,
            confirmed=True,
            headline=f"{percent(level.last)} of the responses are truncated from step {onset} on",
            message=(
                f"The share of truncated responses went from {percent(level.first)} to {percent(level.last)}; half of "
                f"the change had happened by step {onset}{words}."
            ),
            evidence=f"medians over {counted(level.count, 'step')} at both ends of {len(values)}",
            advice=(
                f"raise {own_name(context, 'the response length limit')}, penalize length beyond a budget, or mask "
                "truncated responses"
            ),
            measures={
                "truncated_first": Measure(level.first, "1"),
                "truncated_last": Measure(level.last, "1"),
                "onset": Measure(onset, "step"),
            },
        )
