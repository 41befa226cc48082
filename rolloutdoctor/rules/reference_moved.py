"""RDG011: a reference model that does not stay what it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rolloutdoctor.ops.tally import Sums, by_step, ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

RATES = ("learning_rate", "lr")
"""Names of a logged learning rate, whatever comes before the last slash."""


class _Step(NamedTuple):
    """Means over the trained tokens of a step."""

    step: int
    kl: float
    policy: float
    different: float


@dataclass(frozen=True)
class ReferenceTally(Sums):
    """What `reference-moved` adds up: sums over the trained tokens of each step that are looked at, by its number.

    Attributes:
        tokens: trained tokens that are looked at.
        kl: k3 of policy and reference.
        policy: log-probs of the policy.
        different: tokens whose two log-probs are not the same number; 0 only if there is none in the step.
        moved: tokens of the run whose log-prob at the loss is not the one before the update.
        counted_steps: steps of the run, of which a long series keeps some.
        equal_steps: those whose two log-probs are the same number on every token.
        counted_tokens: their trained tokens that are looked at.
        kl_sum: sum of k3 over these.
        rated: steps that logged a learning rate or the norm of a gradient.
        still: those of them in which one of these is 0.
    """

    tokens: Mapping[str, float] = by_step()
    kl: Mapping[str, float] = by_step()
    policy: Mapping[str, float] = by_step()
    different: Mapping[str, float] = by_step()
    moved: int = 0
    counted_steps: int = 0
    equal_steps: int = 0
    counted_tokens: int = 0
    kl_sum: float = 0.0
    rated: int = 0
    still: int = 0

    @property
    def steps(self) -> list[_Step]:
        """The steps in their order."""
        return [
            _Step(int(name), self.kl[name] / count, self.policy[name] / count, self.different[name])
            for name, count in sorted(self.tokens.items(), key=lambda one: int(one[0]))
        ]


@dataclass(frozen=True)
class ReferenceMoved(Rule[ReferenceTally]):
    """The reference model moved: KL to it drops at once and stays low, or it is the policy itself.

    ## What it does
    Looks for a step from which on the KL of policy and reference is a tenth of what it was, while the policy moves no
    more than usual; and for a reference whose log-probs are those of the policy, bit by bit, while the policy moves.

    ## Why it matters
    The KL term holds the policy near a fixed model. A reference that was loaded anew from a checkpoint of the policy,
    or that shares its weights, holds it near nothing: the KL that is logged looks better than ever.

    ## How it is measured
    The mean of k3 over the trained tokens of each step; of a step with more than 32,768 response tokens every second
    token, every third and so on is looked at. A fall counts where the KL is at most a tenth of that of the step before,
    the largest of three steps from there on is at most half of the smallest of the three before (or the KL is a tenth
    of that smallest, the largest half of the step before, and no other fall is a third of it in logarithms), and the
    mean log-prob of the policy changes by at most three times its median change between neighbouring steps: another
    data set, a restart or a jump of the policy changes that as well. Falls at equal distances are a schedule, and
    information; a single sync of the reference that is not recorded cannot be told from a fault by the rows. A fall to
    a third that is twice as large as any other leaves the rule without a verdict.
    Equal log-probs count in steps after the first, where an earlier step has different ones or the log-probs at the
    loss are not those before the update. Tokens may be equal by rounding: if as many were in the last step with
    different ones, that all of them are has a probability below 2^-40. Equal log-probs in all of six steps or more
    count unless a learning rate or a gradient norm of 0 is logged. Where a sync is recorded (TRL: sync_ref_model), this
    is information. At least six steps are needed.

    ## What to do
    Check where the reference is loaded after a resume, and that it shares no weights with the policy. If the trainer
    syncs it on purpose, there is nothing to mend.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> ref = [-1.2] * 4 + [-1.001] * 4
    >>> steps = [toy_batch([[1, 0]], policy=-1.0, ref=each, step=step) for step, each in enumerate(ref)]
    >>> [found] = diagnose(steps, trainer="trl", select=["RDG011"]).findings
    >>> found.headline
    'KL to the reference falls from 0.0187 to 5e-07 at step 4 and stays low'
    """

    code = "RDG011"
    name = "reference-moved"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/issues/2955",
        "https://github.com/NVIDIA-NeMo/RL/pull/3722",
        "https://github.com/modelscope/ms-swift/issues/3558",
    )
    tally = ReferenceTally
    needs_objective = False
    splits = ("train",)

    fall: float = 0.1
    """Nine tenths between two steps: training moves the KL by parts of it."""

    window: int = 3
    """Steps before and after that must show it, so that one odd batch does not."""

    bits: float = 40.0
    """How unlikely it is that all tokens are equal by rounding."""

    unsure_fall: float = 1 / 3
    """A fall to this, and not to a tenth, is neither a finding nor clean."""

    least_kl: float = 1e-8
    """Below it k3 is what float32 log-probs leave."""

    def columns(self, context: Context) -> frozenset[str]:
        """Log-probs of both models."""
        return frozenset({"policy_log_probs", "ref_log_probs"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, and the log-probs before the update, which show that the policy moves."""
        return frozenset({"old_log_probs", "response_mask"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Keep the tokens that are looked at, and count those of each row that differ from the reference."""
        from rolloutdoctor.evaluation.every_nth import every_nth

        if not block.has("policy_log_probs", "ref_log_probs"):
            return {}
        some = every_nth(block)
        policy_T, ref_T, trained_T = some.column("policy_log_probs"), some.column("ref_log_probs"), some.trained_T
        different_n = some.runs.total(_differ(policy_T, ref_T) & trained_T)
        if some.stride > 1 and not bool(different_n.any()):
            # That they are equal is said of every trained token.
            differ_T = _differ(block.column("policy_log_probs"), block.column("ref_log_probs"))
            different_n = block.row_sum(differ_T & block.trained_T)
        found = {"policy": policy_T, "ref": ref_T, "trained": trained_T, "looked_at": some.runs.lengths}
        if block.is_logged("policy_log_probs") and block.is_logged("old_log_probs"):
            found["old"] = some.column("old_log_probs")
        return {**found, "different": different_n}

    def measure_each(self, steps: "StepView") -> list[ReferenceTally]:
        """Add up the trained tokens of each step that are looked at."""
        from rolloutdoctor.ops.elementwise import difference, is_below, is_unequal, kept
        from rolloutdoctor.ops.segments import Runs

        found, by_step = steps.token_measures.get(self.code), steps.by_step
        if not found or not len(steps.batch):
            return steps.nothing(ReferenceTally)
        policy_T = found["policy"]
        apart_T = difference(found["ref"], policy_T)
        counted_T = found["trained"] & is_below(apart_T.abs(), inf)
        moved_T = counted_T & is_unequal(found.get("old", policy_T), policy_T)
        policy_T, apart_T = (kept(x_T, counted_T) for x_T in (policy_T, apart_T))
        runs = Runs.of_lengths(found["looked_at"])
        terms = counted_T, apart_T.expm1() - apart_T, policy_T, moved_T
        tokens, kl, policy, moved = (by_step.sum(runs.total(x_T)) for x_T in terms)
        different = by_step.sum(found["different"])
        is_seen = tokens > 0
        series = {"tokens": tokens, "kl": kl, "policy": policy, "different": different}
        return steps.tallies(
            ReferenceTally,
            **{name: steps.by_number(x, is_seen) for name, x in series.items()},
            moved=moved.astype(int),
            counted_steps=is_seen.astype(int),
            equal_steps=(is_seen & (different == 0)).astype(int),
            counted_tokens=tokens.astype(int),
            kl_sum=kl,
            rated=[int(bool(_rates(each))) for each in steps.each],
            still=[int(0.0 in _rates(each)) for each in steps.each],
        )

    def measures(self, tally: ReferenceTally) -> Mapping[str, Measure]:
        """The KL, and where it fell."""
        falls = self._falls(tally)
        return {
            "falls": Measure(len(falls), "steps"),
            "first_fall": Measure(falls[0] if falls else None, "step"),
            "kl_mean": Measure(ratio(tally.kl_sum, tally.counted_tokens), "nats"),
            "equal_steps": Measure(tally.equal_steps, "steps"),
            "steps": Measure(tally.counted_steps, "steps"),
        }

    def _falls(self, run: ReferenceTally, *, unsure: bool = False) -> list[int]:
        """Steps at which the KL falls and stays, and the policy does not jump; or falls by less than is sure."""
        steps, size = run.steps, self.window
        if len(steps) < 2 * size:
            return []
        usual = median(abs(one.policy - other.policy) for other, one in pairwise(steps))
        found = []
        for place in range(size, len(steps) - size + 1):
            before, after = steps[place - 1], steps[place]
            low = min(one.kl for one in steps[place - size : place])
            high = max(one.kl for one in steps[place : place + size])
            # A policy that moves fast leaves the new reference at once: the KL stays low for one step then.
            falls = after.kl <= self.fall * before.kl and high <= 0.5 * low
            deep = after.kl <= self.fall * low and high <= 0.5 * before.kl
            falls = falls or (deep and _is_alone(steps, place, 3.0))
            if unsure:
                falls = (
                    _is_alone(steps, place, 2.0)
                    and after.kl <= min(self.unsure_fall * before.kl, 0.75 * low)
                    and high <= 0.75 * before.kl
                )
            if falls and before.kl > self.least_kl and abs(after.policy - before.policy) <= 3 * usual + 1e-12:
                found.append(after.step)
        return found

    def _is_policy(self, run: ReferenceTally) -> list[int]:
        """Steps after the first in which the reference is the policy, where something shows that this one moves."""
        steps, bits = run.steps, 0.0
        equal = [one.step for one in steps[1:] if not one.different]
        before: _Step | None = None
        for one in steps:
            if one.different:
                before = one
            elif before is not None:
                tokens = run.tokens[str(before.step)]
                # One more token of either kind, so that none is impossible.
                bits -= run.tokens[str(one.step)] * log2((tokens - before.different + 1) / (tokens + 2))
        if before is None:
            return equal if len(equal) >= self.window and run.moved else []
        return [step for step in equal if step > _first_different(steps)] if bits >= self.bits else []

    def _is_policy_throughout(self, run: ReferenceTally) -> bool:
        """True if the reference is the policy in all of enough steps, and nothing shows that this one moves."""
        return len(run.steps) >= 2 * self.window and not any(one.different for one in run.steps) and not run.moved

    def inconclusive_reason(self, run: ReferenceTally, context: Context) -> Missing | None:
        """Too few steps to tell before from after, or a policy that stays where it is."""
        if len(run.steps) < 2 * self.window:
            return Missing(
                f"{counted(len(run.steps), 'step')} with log-probs of both models, and it takes {2 * self.window}",
                "widen --steps, or record more steps",
            )
        if self._is_policy_throughout(run) and run.still and run.still == run.rated:
            return Missing("the policy does not move: a learning rate or gradient norm of 0 is logged", "train on")
        unsure = [] if self._is_policy(run) or self._falls(run) else self._falls(run, unsure=True)
        if unsure:
            return Missing(
                f"the KL to the reference falls to a third or less at step {unsure[0]}: a reference that moved part of "
                "the way to the policy and a policy that comes back are alike there",
                "compare the reference's weights with those of the step before, or record prompts that come again",
            )
        return None

    def judge(self, run: ReferenceTally, context: Context) -> Judgement | None:
        """A warning, or information where the falls are a schedule."""
        advice = "check where the reference is loaded after a resume, and that it shares no weights with the policy"
        equal, falls = self._is_policy(run), self._falls(run)
        name = None if context.trainer is None else context.trainer.sync_option
        sync = None if name is None or context.config is None else context.config.settings.get(name)
        synced = sync is not None and sync.is_stated and sync.value is True
        moves = f"; {name} = true is recorded" if synced else ""
        if self._is_policy_throughout(run):
            return Judgement(
                severity=Severity.INFO if synced else Severity.WARNING,
                confirmed=run.rated > run.still,
                headline=f"the reference is the policy, bit by bit, in all of {counted(len(run.steps), 'step')}",
                message="the reference's log-probs are those of the policy on every trained token: it shares its "
                "weights, or the updates change nothing",
                evidence="the log-probs of both models"
                + ("; learning rate and gradient norm are not 0" if run.rated > run.still else "")
                + moves,
                advice=advice,
            )
        if equal:
            return Judgement(
                severity=Severity.INFO if synced else Severity.WARNING,
                confirmed=True,
                headline=f"the reference is the policy, bit by bit, in {counted(len(equal), 'step')} from step "
                f"{equal[0]}",
                message=(
                    f"the reference's log-probs are those of the policy on every trained token of "
                    f"{counted(len(equal), 'step')}, {equal[0]} to {equal[-1]}, while the policy moves"
                ),
                evidence="the log-probs of both models"
                + (f"; {counted(run.moved, 'token')} moved between update and loss" if run.moved else "")
                + moves,
                advice=advice,
            )
        if not falls:
            return None
        gaps = {later - earlier for earlier, later in pairwise(falls)}
        regular = len(falls) > 2 and len(gaps) == 1
        scheduled = synced or regular
        steps = run.steps
        place = next(number_of for number_of, one in enumerate(steps) if one.step == falls[0])
        before, after = steps[place - 1], steps[place]
        return Judgement(
            severity=Severity.INFO if scheduled else Severity.WARNING,
            confirmed=False,
            headline=f"KL to the reference falls from {number(before.kl)} to {number(after.kl)} at step {after.step} "
            "and stays low",
            message=(
                f"the KL to the reference falls by nine tenths at {counted(len(falls), 'step')}"
                + (f", every {gaps.pop()} steps: the reference is synced on a schedule" if regular else "")
                + f"; the policy's mean log-prob goes on from {before.policy:.4g} to {after.policy:.4g}"
            ),
            evidence="the log-probs of both models"
            + (moves or "; a sync that the trainer makes on purpose looks the same"),
            advice=advice,
        )


def _is_alone(steps: "list[_Step]", place: int, times: float) -> bool:
    """True if the logarithm of the KL falls by so many times more there than between any other two steps."""
    falls = [log2(max(before.kl, 1e-300) / max(after.kl, 1e-300)) for before, after in pairwise(steps) if before.kl > 0]
    own = log2(steps[place - 1].kl / max(steps[place].kl, 1e-300)) if steps[place - 1].kl > 0 else 0.0
    return own >= times * max((each for each in falls if each != own), default=0.0)


def _first_different(steps: "list[_Step]") -> int:
    return next(one.step for one in steps if one.different)


def _rates(step: "StepView") -> list[float]:
    """Learning rate and gradient norm, as far as the step logged them."""
    norm = None if step.writer is None else step.writer.grad_norm_metric
    return [value for name, value in step.logged.items() if name == norm or name.rpartition("/")[2] in RATES]


def _differ(policy_T: "Tensor", ref_T: "Tensor") -> "Tensor":
    """Tokens whose two log-probs are known and not the same number, ``[T]`` bool."""
    from rolloutdoctor.ops.elementwise import is_above, is_below

    # Of two float32 numbers the difference is 0 only if they are equal. NaN is neither above nor below.
    size_T = (ref_T - policy_T).abs()
    return is_above(size_T, 0.0) & is_below(size_T, inf)
