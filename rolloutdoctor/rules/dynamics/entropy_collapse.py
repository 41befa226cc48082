"""RDT003: the policy's entropy collapsed, or exploded, from the trainer's log alone."""

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, own_name
from rolloutdoctor.rules.measures.few_choices import few_choices
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, go_back, levels, series, step_at
from rolloutdoctor.rules.series import Ends, crossing, ends
from rolloutdoctor.rules.shift import shift
from rolloutdoctor.rules.table_rule import Measured


class EntropyCollapse(NumbersRule):
    """The entropy of the policy fell to a small fraction of its start, or grew to a multiple of it.

    ## What it does
    Compares the logged entropy at the start with that at the end, and names the step at which it had gone half the way.

    ## Why it matters
    Entropy says how widely the policy samples: near 0 it gives one response to each prompt, so every group is
    zero-variance and learning stops; when it explodes, the policy samples noise. Most healthy runs lose some entropy
    while their reward rises.

    ## How it is measured
    `entropy_first` and `entropy_last` are medians over the first and the last tenth of the logged steps, at least
    three. A collapse is an end below a twentieth of the start, an explosion one above twice the start and 1 nat
    more. Either is an error if the reward is lower at the end than at the start by four standard errors,
    information if it rose by as many (after a collapse only if some group still has a spread), and else a warning.
    An entropy that rises by 0.15 nats and 15 % of its start, and by more than six standard errors, while the reward
    does not, is information, and a warning if the reward falls by six. An entropy a token times the mean length is
    that of a response: below the ln 2 of two equally likely ones in the first and in the last third, without a
    reward that rose by four errors, it is information that the policy hardly samples (`response_entropy`). `onset`
    is the first step from which the running median stays beyond the geometric mean of start and end, or of such a
    rise their mean; if the change takes more than a quarter of the steps, the first that left the start. Confirmed:
    the log shows that it happened, not why.

    ## What to do
    For a collapse lower the learning rate, raise the clip range for positive advantages (`epsilon_high`), or add an
    entropy bonus, and start from a checkpoint before the onset. For an explosion look at the importance ratios and at
    the sampler's gap at the onset, and lower the learning rate.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT003", entropy=[2.4 * 0.5**step for step in range(20)], reward=[0.5] * 20)
    'RDT003 warning confirmed: entropy 0.24'
    """

    code = "RDT003"
    name = "entropy-collapse"
    references = (
        "https://arxiv.org/abs/2505.22617",
        "https://arxiv.org/abs/2503.14476",
    )
    about = ("entropy",)
    beside = ("reward", "zero_variance_share", "response_length")

    collapsed: float = 0.05
    exploded: float = 2.0
    least_growth: float = 1.0
    rises: float = 0.15
    least_rise: float = 0.15
    errors: float = 6.0
    choices: float = 2.0
    """Equally likely responses to a prompt, below which most samples of a group are copies of one."""

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps in the order of their distance from the first."""
        return table.with_columns(value=(pl.col("entropy") - pl.col("entropy").first()).abs())

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the end with the start."""
        values = series(run, "entropy")
        if values.min() < -1e-6:
            return None
        level = ends(values)
        fell = level.last < self.collapsed * level.first
        if not fell and not (level.last > self.exploded * level.first and level.change > self.least_growth):
            return self._rising(run, level, len(values)) or few_choices(run, context, self.choices)
        # What is lost below the limit of a collapse moves its onset no further.
        change = shift(
            values, level.first, level.last, level.first * max(level.last / level.first, self.collapsed**2) ** 0.5
        )
        onset = step_at(run, change.at)
        reward = levels(run, "reward")
        moved = 0 if reward is None or reward.errors < 4 else (1 if reward.change > 0 else -1)
        reward_words = "No reward was logged beside it"
        if reward is not None:
            direction = {1: "rose meanwhile", 0: "did not rise meanwhile", -1: "fell with it"}[moved]
            reward_words = f"The reward {direction}, {from_to(reward.first, reward.last)}"
        spread = levels(run, "zero_variance_share")
        if moved > 0 and fell and spread is not None and spread.last == 1:
            moved, reward_words = 0, f"{reward_words}, and by then every group is zero-variance"
        change_words = change.words(*(("collapsed", "fell") if fell else ("exploded", "rose")), onset)
        return Judgement(
            severity={1: Severity.INFO, 0: Severity.WARNING, -1: Severity.ERROR}[moved],
            confirmed=True,
            headline=(words := f"entropy {change_words}: {from_to(level.first, level.last)} nats"),
            message=f"The entropy {change_words}, {from_to(level.first, level.last)} nats. {reward_words}.",
            evidence=f"medians over the first and the last {level.count} of {len(values)} logged steps",
            advice=(
                f"{go_back(run, onset)}; lower {own_name(context, 'the learning rate')}, raise "
                f"{own_name(context, 'the upper clip range')}, or add an entropy bonus"
                if fell
                else (
                    f"check importance ratios and train-inference mismatch around step {onset}, and lower "
                    f"{own_name(context, 'the learning rate')}"
                )
            ),
            measures={
                "entropy_first": Measure(level.first, "nats"),
                "entropy_last": Measure(level.last, "nats"),
                "onset": Measure(onset, "step"),
            },
            remark=f"{words}, while the reward rose" if moved > 0 else "",
        )

    def _rising(self, run: Measured, level: Ends, count: int) -> Judgement | None:
        """Judge an entropy that rises without a reward that rises."""
        reward = levels(run, "reward")
        if level.change <= max(self.rises * level.first, self.least_rise) or level.errors <= self.errors:
            return None
        moved = 0.0 if reward is None or reward.errors < self.errors else reward.change
        if moved > 0:
            return None
        at = crossing(series(run, "entropy"), (level.first + level.last) / 2, below=False)
        onset = step_at(run, count - 1 if at is None else at)
        clause = (
            ""
            if reward is None
            else f", while the reward {'fell' if moved < 0 else 'went'} {from_to(reward.first, reward.last)}"
        )
        return Judgement(
            severity=Severity.WARNING if moved < 0 else Severity.INFO,
            confirmed=True,
            headline=f"the entropy rose {from_to(level.first, level.last)} nats{clause}",
            message=f"The entropy rose {from_to(level.first, level.last)} nats{clause}; half of it by step {onset}.",
            evidence=f"medians over the first and the last {level.count} of {count} logged steps",
            advice="lower the entropy bonus or the learning rate, and check the sign of the entropy term",
            measures={
                "entropy_first": Measure(level.first, "nats"),
                "entropy_last": Measure(level.last, "nats"),
                "onset": Measure(onset, "step"),
            },
        )
