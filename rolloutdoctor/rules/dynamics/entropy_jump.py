"""RDT014: the entropy jumps within one step and stays there, from the trainer's log alone."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, own_name
from rolloutdoctor.rules.level_jump import isolated_jump, level_jump
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, series, step_at
from rolloutdoctor.rules.table_rule import Measured


class EntropyJump(NumbersRule):
    """The entropy changes by a tenth or more from one step to the next, and stays at the new level.

    ## What it does
    Looks for one step whose change of the logged entropy is far above all changes around it.

    ## Why it matters
    An update of ordinary size moves the entropy little. A jump that stays is a change of what is sampled or measured:
    another temperature, other weights after a restart, or another tokenizer, chat template or set of prompts.

    ## How it is measured
    A finding requires that the change from one line to the next is four times every other change among the five lines
    before and the five after, and the standard deviation of all changes, that the medians of these lines, and of the
    50 on either side, differ by more than half of it, and that it is a tenth of the level before or more. For noisy
    entropies: ten lines on either side are flat and stay on their own side of the middle of the change, which is
    within one step, a fifth of the level before or more, and five standard deviations of the noise. An outlier goes
    back, and does not count. Updates on one generated batch have nearly one entropy, whatever the next batch has: if
    a log has a reward only at some lines, up to 16 lines from one to the next count as one line. A warning,
    confirmed: the log shows that it happened, not what changed. `onset` is the first step of the new level.

    ## What to do
    Compare the sampling temperature, the weights, the data and the template of the runs or phases that meet there.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT014", entropy=[1.0, 1.01] * 10 + [1.6, 1.61] * 10)
    'RDT014 warning confirmed: entropy 1.305'
    """

    code = "RDT014"
    name = "entropy-jump"
    references = ("https://github.com/volcengine/verl/issues/6806",)
    about = ("entropy",)
    beside = ("reward",)

    fewest: int = 12
    times: float = 4.0
    share: float = 0.1
    around: int = 5
    lines: int = 10
    large: float = 0.2
    deviations: float = 5.0
    updates: int = 16
    """Updates on one generated batch, of which trainers log the reward once."""

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each generated batch: the updates on it share its responses."""
        lines, begins = super().table(run, context), pl.col("reward").is_finite().fill_null(value=False)
        batches = lines.group_by(batch=begins.cum_sum(), maintain_order=True).agg(
            pl.first("step", "split", "reward"), pl.mean("entropy"), updates=pl.len()
        )
        is_shared = len(batches) > 1 and 1 < batches.select(pl.median("updates")).item() <= self.updates
        return batches.drop("batch", "updates") if is_shared else lines

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look for the largest such jump."""
        values = series(run, "entropy")
        jump = isolated_jump(values, times=self.times, share=self.share, around=self.around)
        jump = jump or level_jump(values, lines=self.lines, share=self.large, deviations=self.deviations)
        if jump is None:
            return None
        at, before, after = jump
        onset = step_at(run, at)
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"the entropy jumps {from_to(before, after)} nats at step {onset}, within one step, and stays",
            message=f"The entropy goes {from_to(before, after)} nats from the step before {onset} to the next and "
            "stays there: no update of ordinary size does that.",
            evidence=f"the logged entropy of {counted(len(values), 'step')}",
            advice=(
                f"compare {own_name(context, 'the sampling temperature')}, the weights and the data before and after "
                f"step {onset}"
            ),
            measures={
                "entropy_before": Measure(before, "nats"),
                "entropy_after": Measure(after, "nats"),
                "onset": Measure(onset, "step"),
            },
        )
