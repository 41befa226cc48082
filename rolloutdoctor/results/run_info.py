"""`RunInfo`: what a run holds, what can be checked, and what would make the rest checkable."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolloutdoctor.results.display import Displayed
from rolloutdoctor.results.findings import InputSummary, NotApplicable, RunSetting, Setting, Skipped

TIERS = {
    0: "metrics only, no rollouts",
    1: "scalars: rewards and groups, no log-probs",
    2: "one log-prob: advantages and masks, no reference",
    3: "exact: loss, KL and its gradient for every logged token",
}


@dataclass(frozen=True)
class RunInfo(Displayed):
    """Facts that `info` shows.

    Attributes:
        files: names of the files.
        input: rows, steps, groups and tokens.
        splits: rows of each split.
        first_step: the lowest step, or None.
        last_step: the highest step, or None.
        columns: canonical column to its meaning, for those that are there.
        absent: canonical column to what would record it, for those that are not.
        unread: columns of the file that mean nothing here.
        metrics: names of the logged metrics.
        tier: how much can be computed.
        runnable: ``(code, name)`` of the rules that can run.
        skipped: the rules that cannot, with remedies.
        trainer: name of the trainer, or None.
        config: its options with origins.
        settings: what the run states of itself beside these options.
        unstated: what to state of the run where there is no trainer.
        not_applicable: the rules whose fault the recorded options rule out.
        dropped: steps and splits that a recorder let go because writing could not keep up.
        notes: what was left out of the files, or read in doubt, one sentence each.
        agent: of a run of an agent, the columns of trajectories that are missing, with what would record them; None:
            nothing says that it is one.
    """

    files: tuple[str, ...]
    input: InputSummary
    splits: dict[str, int]
    first_step: int | None
    last_step: int | None
    columns: dict[str, str]
    absent: dict[str, str]
    metrics: tuple[str, ...]
    tier: int
    runnable: tuple[tuple[str, str], ...]
    skipped: tuple[Skipped, ...]
    trainer: str | None = None
    config: dict[str, Setting] = field(default_factory=dict)
    settings: tuple[RunSetting, ...] = ()
    unstated: str = ""
    dropped: tuple[tuple[int, str], ...] = ()
    not_applicable: tuple[NotApplicable, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    agent: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        """Summarise the run in a line."""
        rules = f"{len(self.runnable)} rules can run, {len(self.skipped)} cannot"
        return f"<RunInfo {self.trainer or 'unknown trainer'}: {self.input.rows:,} rows, tier {self.tier}; {rules}>"

    @property
    def tier_meaning(self) -> str:
        """Describe how much can be computed."""
        return TIERS[self.tier]
