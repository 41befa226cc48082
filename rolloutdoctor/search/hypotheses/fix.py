"""`Fix`: a named edit of an objective, with its threads upstream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rolloutdoctor.metric_names.repositories import REPOSITORIES
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns, reward_kl_columns
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.hypothesis import ObjectiveEdit, always

Condition = Callable[[Objective], bool]

READ_IN = "September 2026"
"""When the threads were read."""


def no_columns(objective: Objective) -> frozenset[str]:
    """Need no further column."""
    return frozenset()


@dataclass(frozen=True)
class Thread:
    """An issue or a pull request upstream, as it stood when it was read.

    Attributes:
        url: its address.
        status: a pull request is open, closed without a merge, or merged; an issue open or closed.
        release: the first release that has the merged change; empty: none, or not known.
    """

    url: str
    status: Literal["open", "closed", "merged"]
    release: str = ""

    @property
    def words(self) -> str:
        """``merged, in 1.9.0``."""
        return f"{self.status}, in {self.release}" if self.release else self.status

    @property
    def number(self) -> str:
        """``#2114``."""
        return f"#{self.url.rpartition('/')[2]}"

    def is_of(self, trainer: str) -> bool:
        """Tell whether it is in the repository of a trainer: RLOO and NeMo-RL have another name there."""
        repository = self.url.split("/")[4].lower()
        return repository == REPOSITORIES.get(trainer, trainer)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A named edit of what a trainer computes.

    Attributes:
        name: what `--fix` takes.
        code: of the rule that says of a run that it computes without it, and of what size that is.
        summary: what it changes, in one line.
        fault: what is computed without it, as a clause.
        story: where it comes from, and what upstream says of it.
        stage: the first stage of the audit that it reaches (`audit.tally.STAGES`).
        contested: True if upstream holds the present behaviour to be a choice.
        needs: what an objective has where it applies, as an object of "needs"; empty: it applies to every one.
        applies: tells whether it is about what an objective computes.
        variants: name to edit; the first is the default.
        notes: one line for each variant.
        only_where: variant to what it needs beyond that, where it needs more.
        columns: columns of a run, beyond those of the objective, without which it cannot show itself.
        is_tried: a run may have it although its release has not: it is tried where the log disagrees.
        by_option: an option of the trainer asks for what is computed without it, which is a property then.
        of_data: whether a run has the fault is told by its rows, not by the release.
        of_rounding: it is about the rounding of the trainer's own float32 group statistics.
        releases: trainer to its releases that compute without it, where not all do; those that were read.
        upstream: threads about it.
        sources: papers, and code where there is no thread.
    """

    name: str
    code: str
    summary: str
    fault: str
    story: str
    stage: str
    contested: bool
    needs: str
    applies: Condition
    variants: Mapping[str, ObjectiveEdit]
    notes: Mapping[str, str]
    only_where: Mapping[str, Condition] = field(default_factory=dict)
    columns: Callable[[Objective], frozenset[str]] = no_columns
    is_tried: bool = True
    by_option: bool = False
    of_data: bool = False
    of_rounding: bool = False
    releases: Mapping[str, str] = field(default_factory=dict)
    upstream: tuple[Thread, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def references(self) -> tuple[str, ...]:
        """Addresses of threads, papers and code."""
        return (*(thread.url for thread in self.upstream), *self.sources)

    @property
    def status(self) -> str:
        """How far the change has come upstream: of the pull requests, and where there are none of the issues."""
        pulls = [thread for thread in self.upstream if "/pull/" in thread.url] or self.upstream
        ranked = sorted(
            pulls, key=lambda thread: (("merged", "open", "closed").index(thread.status), not thread.release)
        )
        if not ranked:
            return "no thread upstream"
        return "closed, not merged" if ranked[0].status == "closed" else ranked[0].words

    def remedy(self, trainer: str, title: str) -> str:
        """Say which release of a trainer has it, by its own threads: ``use slime after 0.3.1 (#2114)``.

        Args:
            trainer: its name, as of the table of trainers.
            title: its name for people.
        """
        threads = [thread for thread in self.upstream if thread.is_of(trainer) and "/pull/" in thread.url]
        merged = [thread for thread in threads if thread.status == "merged"]
        if merged:
            done = max(merged, key=lambda thread: bool(thread.release))
            affected = self.releases.get(trainer, "").partition("up to ")[2].partition(" ")[0]
            if not done.release and not affected:
                return f"use a release of {title} that has {done.number}"
            return f"use {title} {f'{done.release} or newer' if done.release else f'after {affected}'} ({done.number})"
        if any(thread.status == "open" for thread in threads):
            numbers = ", ".join(thread.number for thread in threads if thread.status == "open")
            return f"not released ({title} {numbers} was open in {READ_IN}): patch the trainer"
        return f"no release of {title} with this change is known: patch the trainer"

    def concerned(self) -> str:
        """Trainers and releases that compute without it."""
        return ", ".join(" ".join([name, self.releases.get(name, "")]).strip() for name in self.trainers())

    def applies_to(self, objective: Objective, variant: str) -> bool:
        """True if a variant is about what an objective computes."""
        return self.applies(objective) and self.only_where.get(variant, always)(objective)

    def trainers(self, variant: str | None = None) -> tuple[str, ...]:
        """Names of the trainers that it applies to: with a variant, or with any."""
        # The pages of rules name fixes, and load no trainer.
        from rolloutdoctor.trainers.table import TRAINERS

        chosen = self.variants if variant is None else (variant,)
        named = () if variant in self.only_where else self.releases
        examples = {trainer.name: trainer.example() for trainer in TRAINERS.values()}
        return tuple(
            name
            for name, each in examples.items()
            if name in named or any(self.applies_to(each, choice) for choice in chosen)
        )


@dataclass(frozen=True)
class ChosenFix:
    """A fix with its variant, as in ``zero-std:pr5640``."""

    fix: Fix
    variant: str

    @property
    def label(self) -> str:
        """``NAME:VARIANT``."""
        return f"{self.fix.name}:{self.variant}"

    def applies_to(self, objective: Objective) -> bool:
        """True if the fix, in this variant, is about what the objective computes."""
        return self.fix.applies_to(objective, self.variant)

    def columns(self, objective: Objective) -> frozenset[str]:
        """Columns without which its effect on an objective cannot show itself, beyond those of any advantage."""
        fixed, needed = self.apply(objective), self.fix.columns(objective)
        for columns in (advantage_columns, loss_columns):
            needed |= columns(fixed) - columns(objective)
        of_stage = {"loss": loss_columns, "kl": reward_kl_columns}.get(self.fix.stage, no_columns)
        return needed | of_stage(objective)

    def apply(self, objective: Objective) -> Objective:
        """Return the edited objective.

        Raises:
            UsageError: if the fix is not about what the objective computes.
        """
        if not self.applies_to(objective):
            trainers = ", ".join(self.fix.trainers(self.variant)) or "other options"
            raise UsageError(f"fix {self.label} applies to {trainers}, not to this run of {objective.trainer}")
        return self.fix.variants[self.variant](objective)
