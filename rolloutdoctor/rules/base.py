"""What a rule is given and gives, with the wording of `rules.wording`: all that a simple rule imports.

This module and the rules import no tensors and no trainers, so that the pages of rules open at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rolloutdoctor.data.windows import MEAN, Window
from rolloutdoctor.metric_names.name import MetricName
from rolloutdoctor.metric_names.table import understood, writers
from rolloutdoctor.metric_names.training_kind import (
    DISTILLATION,
    LOSSES,
    RL,
    SUPERVISED,
    names_distillation,
    training_kind,
)
from rolloutdoctor.objective.parts import has_baseline_per_row
from rolloutdoctor.ops.bounds import share_bound
from rolloutdoctor.ops.logged_digits import Digits
from rolloutdoctor.results.audit import Cause, Refuted
from rolloutdoctor.results.findings import Excluded, Measure, RunSetting, Severity
from rolloutdoctor.rules.wording import FEW_LINES, counted, deviation, logged_lines, number, percent

if TYPE_CHECKING:
    from rolloutdoctor.audit.tally import AuditTally
    from rolloutdoctor.objective.objective import Objective
    from rolloutdoctor.rules.logged_gaps import LoggedGap
    from rolloutdoctor.trainers.deciding_options import Deciding
    from rolloutdoctor.trainers.options import Config
    from rolloutdoctor.trainers.spec import Trainer

__all__ = [
    "FEW_LINES",
    "KEEP_EXAMPLES",
    "MIXED_SPLITS",
    "Context",
    "Judgement",
    "Missing",
    "baseline_per_token",
    "counted",
    "deviation",
    "excluded_share",
    "logged_lines",
    "logs_remedy",
    "made_otherwise",
    "number",
    "own_name",
    "percent",
    "release_with_fix",
    "sampling_option",
    "too_few",
]

KEEP_EXAMPLES = 5
"""Examples kept by each rule, the worst of the run."""


@dataclass(frozen=True)
class Context:
    """Facts that are known before the first row is read.

    Attributes:
        columns: canonical columns of the run.
        files: names of its files.
        ends: its first and its last step; None if unknown.
        misspelt: canonical column that the files lack to a column of theirs with a name much like it.
        metrics: names of the logged metrics.
        unread: metrics of which the log has no number to what it has.
        trainer: who made the run, or None if nothing says.
        made_by: name and version of who made the run as its files say, each or None; also where too little is stated.
        config: its configuration, or None.
        objective: what it computes, or None.
        version_stated: somebody said which version of the trainer made the run.
        unread_release: why the release of the run proves nothing; empty where its code was read.
        has_rows: False if there are logged metrics and no rollouts.
        recording: canonical column to what would record it, in the words of the trainer or of the dump; ``*`` is any
            other, and ``metrics`` its log.
        digits: name of a logged metric to what its values may have been rounded to.
        lists_places: every place is to be listed, not the largest alone.
        unstated: what to state of the run where nothing says which trainer made it, or with which options.
        imported: True if an importer made the rows of rollout files, and looked at the files themselves.
        omits_rows: True if the rows come from files that need not hold all rows of a step.
        splits_unknown: evaluation rows among the rows cannot be distinguished from training rows.
        world_size: how many ranks recorded; 0 if nothing says.
        total_steps: optimizer steps that the run was planned for, as its log or its options say; None if nothing says.
        settings: what the run states of itself beside the options of its objective.
        counted_steps: whether the log says no step, so that its lines are numbered from 1.
        environment: of Gymnasium that the text of the log names; empty if it names none.
        loss_below_0: a logged loss is negative, which is that of a policy: no cross-entropy is.
        held_out_loss: evaluations log a loss.
        part: which of the runs in a log it is, where there are several.
        missing_ranks: those of which no file was given.
        averaged: names of metrics that were logged as means over several steps, and so are no value of one.
        windows: the steps that these are means over, and the values.
        refuted: options that the log contradicts.
        refutable: the log holds a metric that could contradict an option.
        causes: code of a rule to the causes of disagreements that it reports; known once the steps were read.
        means: name of a metric to how its means over several steps compare; known once the steps were read.
        audit: logged quantity to how its values compare; known once the steps were read.
        partly: logged quantities of which a cause explains some values and not all; known once the steps were read.
        given: those that agree where the logged advantages are taken as they are; known once the steps were read.
        gaps: quantity to the training steps in which the log has no number of it; known once the steps were read.
        unexplained: logged quantity to how its values differ from the recomputed ones, where no known cause explains
            them; known once the steps were read.
    """

    columns: frozenset[str]
    files: tuple[str, ...] = ()
    ends: tuple[int, int] | None = None
    misspelt: Mapping[str, str] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()
    unread: Mapping[str, str] = field(default_factory=dict)
    trainer: "Trainer | None" = None
    made_by: tuple[str | None, str | None] = (None, None)
    config: "Config | None" = None
    objective: "Objective | None" = None
    version_stated: bool = False
    unread_release: str = ""
    averaged: frozenset[str] = frozenset()
    windows: tuple[Window, ...] = ()
    means: "AuditTally" = field(default_factory=dict)
    has_rows: bool = True
    imported: bool = False
    omits_rows: bool = False
    splits_unknown: bool = False
    world_size: int = 0
    total_steps: int | None = None
    settings: tuple[RunSetting, ...] = ()
    counted_steps: bool = False
    environment: str = ""
    loss_below_0: bool = False
    held_out_loss: bool = False
    part: str = ""
    missing_ranks: tuple[int, ...] = ()
    digits: Mapping[str, tuple[Digits, ...]] = field(default_factory=dict)
    recording: Mapping[str, str] = field(default_factory=dict)
    refuted: tuple[Refuted, ...] = ()
    refutable: bool = False
    causes: Mapping[str, tuple[Cause, ...]] = field(default_factory=dict)
    audit: "AuditTally" = field(default_factory=dict)
    partly: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    gaps: Mapping[str, "tuple[LoggedGap, ...]"] = field(default_factory=dict)
    unexplained: "AuditTally" = field(default_factory=dict)
    lists_places: bool = False
    unstated: str = "name it with --trainer NAME (and --set KEY=VALUE); `rolloutdoctor explain trainers` lists them"

    @cached_property
    def quantities(self) -> Mapping[str, tuple[str, MetricName]]:
        """Canonical quantity to the metric that holds it, a mean over several steps perhaps, and what that is."""
        stated = self.config if self.version_stated else None
        release = None if stated is None else ".".join(map(str, stated.version))
        return understood(self.metrics | self.averaged, None if self.trainer is None else self.trainer.name, release)

    @cached_property
    def training_kind(self) -> str:
        """The kind of training, by the names of the logged metrics: see `metric_names.training_kind`.

        A trainer that is stated tells it of a log of losses alone, as of the table of a notebook, or a loss below 0.
        """
        if any(names_distillation(setting.name, setting.value) for setting in self.settings):
            return DISTILLATION
        names = self.metrics | self.averaged | self.unread.keys()
        kind = training_kind(names, self.environment, has_held_out_loss=self.held_out_loss)
        is_stated = kind == LOSSES and self.trainer is not None
        return RL if is_stated or (kind in {LOSSES, SUPERVISED} and self.loss_below_0) else kind

    def column_of(self, metric: str) -> str:
        """Return the name under which tables have a metric, or its means over several steps."""
        return metric if metric in self.metrics else f"{MEAN}{metric}"

    def to_record(self, name: str) -> str:
        """Say what would record a column, in the words of the trainer or of the dump where these are known."""
        return self.recording.get(name, self.recording.get("*", f"record {name}"))

    @cached_property
    def deciding(self) -> "Mapping[str, Deciding]":
        """Return stage to the options that decide it; nothing where the trainer or its options are unknown."""
        if self.trainer is None or self.config is None:
            return {}
        from rolloutdoctor.trainers.deciding_options import deciding_options

        return deciding_options(self.trainer, self.config)

    @cached_property
    def likely_writers(self) -> tuple[str, ...]:
        """Name of who made the run; where nothing says, of the trainers whose names the log has."""
        return writers(self.metrics | self.averaged) if self.trainer is None else (self.trainer.name,)

    @property
    def writer(self) -> "Trainer | None":
        """Who made the run; where nothing says, the trainer whose names the log has."""
        from rolloutdoctor.trainers.table import trainer_from_metric_names

        return self.trainer or trainer_from_metric_names(self.metrics)

    @property
    def logs_each_step(self) -> bool:
        """True where the trainer is known and has no logging interval: a line is one step."""
        return self.writer is not None and self.writer.roles.window is None


@dataclass(frozen=True)
class Missing:
    """Reason why a rule cannot run, and the remedy."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Judgement:
    """Wording and weight of the finding that a rule makes of its measures.

    Attributes:
        severity: how much it matters.
        confirmed: True if logged values prove it.
        headline: the magnitude, in a few words.
        message: what was found, one or two sentences.
        evidence: which logged value matched which formula, or what the exposure rests on.
        advice: what to do.
        measures: numbers beside those of `quantities`.
        cause: the hypothesis that established it, or None.
        fix: the fix (``NAME:VARIANT``) that removes it, where that depends on what was found.
        why: why it matters, where that depends on what was found; else the page of the rule says it.
        remark: what belongs beside "no fault was found", as a clause; empty for most, and the headline if it `hinders`.
        hinders: it may be why the reward does not rise, and is said before that.
    """

    severity: Severity
    confirmed: bool
    headline: str
    message: str
    evidence: str
    advice: str
    measures: Mapping[str, Measure] = field(default_factory=dict)
    cause: Cause | None = None
    fix: str | None = None
    why: str = ""
    remark: str = ""
    hinders: bool = False


MIXED_SPLITS = Missing(
    "evaluation rows cannot be distinguished from training rows",
    "put trainer_state.json, which records the evaluation steps, beside the dump's folder",
)


def too_few(count: int, noun: str, of: str, needed: int, remedy: str = "widen --steps") -> Missing | None:
    """Say that a rule saw fewer of something than it needs; None if it saw enough."""
    return Missing(f"{counted(count, noun)} {of}; needs {needed}", remedy) if count < needed else None


def baseline_per_token(context: Context) -> Missing | None:
    """Say that a group baseline for each token cannot be tested by a rule that compares one for each response."""
    objective = context.objective
    if objective is None or has_baseline_per_row(objective):
        return None
    return Missing(
        "the estimator has a group baseline per token; this rule compares one per response",
        "compare both with `rolloutdoctor diff --fix rejected-rows`: no column can change that",
    )


def made_otherwise(context: Context) -> Missing | None:
    """Say that the logged advantages have another cause, so that those of the options prove nothing."""
    for code, causes in sorted(context.causes.items()):
        for cause in causes:
            if "advantages" in cause.explains:
                return Missing(
                    f"the recorded options do not reproduce the logged advantages, but a cause of {code} does: "
                    f"{cause.words}",
                    f"fix what {code} reports, or pass the run's options with --set, then check again",
                )
    return None


def own_name(context: Context, name: str) -> str:
    """Name an option in words, and as the trainer of the run does where that is known."""
    option = None if context.writer is None else context.writer.roles.advised.get(name)
    return name if option is None else f"{name} ({option})"


def kl_coefficient(context: Context, *, in_reward: bool | None = None) -> str:
    """Name the coefficient of the KL that the run has: that of the loss, or of the penalty in the reward.

    Args:
        context: of the run.
        in_reward: the KL in question is in the reward; None: as the objective of the run has it.
    """
    title, objective, writer = "the KL coefficient", context.objective, context.writer
    if in_reward is None:
        in_reward = objective is not None and objective.kl_loss is None and objective.kl_reward is not None
    penalty = None if writer is None or not in_reward else writer.choices.penalty_option
    return own_name(context, title) if penalty is None else f"{title} ({penalty})"


def sampling_option(context: Context, name: str) -> float | None:
    """A number with which the run says that it sampled, such as ``temperature``; None where it is not recorded."""
    if context.config is None:
        return None
    for full, setting in context.config.settings.items():
        is_option = full.rpartition(".")[2] in (name, f"rollout_{name}") and "val_kwargs" not in full
        if is_option and not setting.assumed and not setting.origin.startswith("default of "):
            return float(setting.value) if isinstance(setting.value, int | float) else None
    return None


def logs_remedy() -> str:
    """Name the logs to give where the trainer of the run is unknown."""
    from rolloutdoctor.trainers.table import TRAINERS

    files = ", ".join(dict.fromkeys(trainer.log.file for trainer in TRAINERS.values() if trainer.log.file is not None))
    return f"give the trainer's log as well: {files}, or an export as CSV or JSON Lines"


def release_with_fix(context: "Context", name: str) -> str:
    """Say which release of the run's trainer has a fix, or that none has."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    if context.trainer is None:
        return "patch the trainer"
    return FIXES[name].remedy(context.trainer.name, context.trainer.title)


def excluded_share(code: str, effect: str, count: int, total: int, *, limit: float, of: str) -> Excluded:
    """Bound the share of what a rule looks for, at 99.9 %, by what it found of what it saw.

    Args:
        code: code of the rule.
        effect: what it looks for, a noun with its article.
        count: how many it found.
        total: how many it looked at, at least 1.
        limit: share from which the rule reports.
        of: what it looked at, a plural.
    """
    return Excluded(code, effect, share_bound(count, total)[1], "", count / total, limit, total, of)
