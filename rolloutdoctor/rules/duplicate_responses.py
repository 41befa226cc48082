"""RDI009: responses that occur again, more often than sampling explains."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

from rolloutdoctor.objective.required_columns import prompt_columns, response_columns
from rolloutdoctor.ops.tally import Sums, bottom_k, by_name, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.same_prefixes import SharedPrefixes
    from rolloutdoctor.evaluation.same_rows import SameRows
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

SAMPLER = ("rollout_log_probs", "old_log_probs", "policy_log_probs")
"""Log-probs that say how likely a response was, best first."""

BEYOND = 50
"""Nats of a prefix that no two responses share by chance."""

PREFIXES = 64
"""Prefixes of a run that are compared across steps."""

SAMPLE = 256
"""Responses of a run that are compared across steps."""


@dataclass(frozen=True)
class DuplicateTally(Sums):
    """What `duplicate-responses` adds up over training steps; rows without a token are left out.

    Attributes:
        rows: rows in groups of two or more.
        groups: these groups.
        different: different responses, group by group.
        alike: groups with a single response.
        lost: sum over groups of the share of the reward variance that copies take away.
        pairs: pairs of rows in a group.
        all_pairs: pairs of rows in a step.
        judged: rows with a log-prob.
        longest_odds: nats of the least likely response.
        expected: copies in groups that are expected of independent draws.
        copies: copies in groups, by the least nats of their response.
        across: the same in other groups of a step.
        other_ranks: of the latter, those on another rank.
        steps: steps with a response.
        sample: hash of a prompt and response, and step, to the log-prob of the response, of some of them.
        prefixed: rows that share an unlikely prefix with another response of their group, beyond the first of each.
        prefixed_across: the same of other groups of the prompt in a step.
        prefixed_groups: groups with such rows.
        longest: tokens of the longest such prefix.
        prefixes: hash of a prompt and prefix, and step, to the log-prob of the prefix, of some unlikely ones.
    """

    rows: int = 0
    groups: int = 0
    different: int = 0
    alike: int = 0
    lost: float = 0.0
    pairs: float = 0.0
    all_pairs: float = 0.0
    judged: int = 0
    longest_odds: float = largest()
    expected: float = 0.0
    copies: Mapping[str, float] = by_name()
    across: Mapping[str, float] = by_name()
    other_ranks: int = 0
    steps: int = 0
    sample: Mapping[str, float] = bottom_k(SAMPLE)
    prefixed: int = 0
    prefixed_across: int = 0
    prefixed_groups: int = 0
    longest: float = largest()
    prefixes: Mapping[str, float] = bottom_k(PREFIXES)

    @property
    def copied(self) -> int:
        """Rows beyond the first of each response of a group."""
        return self.rows - self.different

    def beyond(self, copies: Mapping[str, float], nats: float) -> int:
        """Copies of responses with a log-prob below minus `nats`."""
        return int(sum(count for name, count in copies.items() if float(name) >= nats))


@dataclass(frozen=True)
class DuplicateResponses(Rule[DuplicateTally]):
    """The same response several times, where independent draws would not repeat it.

    ## What it does
    Looks for responses that are equal token by token: in a group, in several groups of a step, and after the same
    prompt in several steps. The log-prob of a response tells copies that no sampler makes by chance from short or
    certain answers.

    ## Why it matters
    Requests that share a seed, or an engine that answers from a cache, turn a group of eight into a group of one: the
    baseline compares a response with itself, and compute is spent on copies. A policy that has collapsed repeats
    itself too, but there is nothing wrong with the sampler.

    ## How it is measured
    The chance that a draw repeats a response is the exponential of the sum of its log-probs (the sampler's, else the
    trainer's) over trained tokens, so masked tool output does not count. Copies whose sum is below minus 30, less the
    logarithm of the number of pairs that were compared, have a chance below 1e-13 in the whole run; so have several
    copies of likelier ones, down to half as many nats, where their number has (Chernoff's bound, at no more than that
    chance for each pair). Where every response is likelier than that, the rule is skipped. If every group has
    a single response, temperature 0 looks the same, and the finding is a warning; if groups have several, sampling was
    on, and it is an error. Copies with larger chances are information from a quarter of the rows on. Across steps 256
    responses, chosen by their hash, are followed; one that comes again with the same `rollout_log_probs` is the same
    sample, trained on again (a replay buffer, or several updates for one generation), and information.
    Prefixes of 32, 64 and so on up to 2,048 tokens are compared, too: two different responses of one prompt that share
    one whose trained tokens have more than 50 nats did not come by it by chance (1e-13 for 10^8 pairs). Engines with
    one seed part where their rounding differs; so does temperature 0, and a sampler that branches responses on purpose
    looks the same: a warning. A policy that has collapsed, and short or certain beginnings, have fewer nats; a
    beginning that groups of different prompts share was forced (`RDI006`). Of prefixes of 128 tokens 64 are followed
    across steps; with the same log-probs they are one sample.

    `copies_expected` is what independent draws with the probabilities of these responses would give.
    `effective_group_size` counts the different responses of a group; `reward_variance_lost` is the share of the
    variance within a group that copies take away, of that of independent draws.

    ## What to do
    Give every request a seed of its own, or none, on every rank and at every step, and check the cache of the engine.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> ids = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 9, 9, 9], [6, 9, 9, 9]]
    >>> batch = toy_batch([[1, 0, 1, 0]], rollout=-12.0, per_token={"response_ids": ids})
    >>> diagnose_one("RDI009", batch, trainer=None)
    'RDI009 error confirmed: impossible_copies 1'
    """

    code = "RDI009"
    name = "duplicate-responses"
    references = (
        "https://github.com/modelscope/ms-swift/issues/7858",
        "https://github.com/NVIDIA-NeMo/RL/issues/171",
        "https://github.com/volcengine/verl/issues/912",
    )
    tally = DuplicateTally
    needs_objective = False
    splits = ("train",)

    nats: float = 30.0
    """A chance of 1e-13 for a pair, before the number of pairs is taken off."""

    info_above: float = 0.25
    """Share of copies: on short answers a few are as expected."""

    def columns(self, context: Context) -> frozenset[str]:
        """The responses, and which belong to one prompt."""
        return response_columns(context.columns) | {"group_id"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """How likely the responses were, which tokens are theirs, and which prompts recur in other steps."""
        named = {self._log_probs(context.columns), "response_mask", "rank", "generation_id"}
        return frozenset(named) | prompt_columns(context.columns)

    def _log_probs(self, columns: frozenset[str]) -> str:
        return next((name for name in SAMPLER if name in columns), SAMPLER[0])

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Hash each response, and add up its log-probs."""
        from rolloutdoctor.evaluation.same_prefixes import response_sums

        return response_sums(block, next((name for name in SAMPLER if block.is_logged(name)), None))

    def measure_each(self, steps: "StepView") -> list[DuplicateTally]:
        """Compare the rows of each step, and keep some for the others."""
        from rolloutdoctor.evaluation.same_prefixes import kept_prefixes
        from rolloutdoctor.evaluation.same_rows import kept_responses

        same, shared = self._same(steps), self._shared(steps)
        if same is None:
            return steps.nothing(DuplicateTally)
        of_steps = steps.batch, steps.token_measures[self.code]
        return steps.tallies(
            DuplicateTally,
            longest_odds=steps.by_step.high(-steps.token_measures[self.code]["log_prob"])
            if "log_prob" in steps.token_measures[self.code]
            else [0.0] * len(steps.each),
            **same.counts,
            **({} if shared is None else shared.counts),
            sample=kept_responses(*of_steps, SAMPLE),
            prefixes=kept_prefixes(*of_steps, PREFIXES),
        )

    def _shared(self, steps: "StepView") -> "SharedPrefixes | None":
        from rolloutdoctor.evaluation.same_prefixes import shared_prefixes

        measured = steps.token_measures.get(self.code, {})
        return steps.cached(f"{self.code} prefixes", lambda: shared_prefixes(steps.batch, measured))

    def _same(self, steps: "StepView") -> "SameRows | None":
        from rolloutdoctor.evaluation.same_rows import compare_rows

        measured = steps.token_measures.get(self.code, {})
        return steps.cached(self.code, lambda: compare_rows(steps.batch, measured))

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Copies of the least likely responses."""
        same = self._same(step)
        if same is None:
            return ()

        def note(row: int) -> str:
            if not same.unlikely_N[row]:
                return "begins as another response of its prompt"
            view, twin = step.own_row(same.twin_of(row))
            return f"the same response as {view.batch.sample_name(twin)}"

        shared = self._shared(step)
        worst_N = same.unlikely_N if shared is None else same.unlikely_N.maximum(shared.nats_N)
        return step.worst_rows(worst_N, note, KEEP_EXAMPLES)

    def measures(self, tally: DuplicateTally) -> Mapping[str, Measure]:
        """How many copies, and what they cost."""
        return {
            "impossible_copies": Measure(self._beyond_chance(tally, tally.copies, tally.pairs), "rows"),
            "impossible_copies_in_other_groups": Measure(
                self._beyond_chance(tally, tally.across, tally.all_pairs), "rows"
            ),
            "copies": Measure(tally.copied, "rows"),
            "copies_share": Measure(ratio(tally.copied, tally.rows), "share"),
            "copies_expected": Measure(tally.expected if tally.judged else None, "rows"),
            "effective_group_size": Measure(ratio(tally.different, tally.groups), "rows"),
            "group_size": Measure(ratio(tally.rows, tally.groups), "rows"),
            "reward_variance_lost": Measure(ratio(tally.lost, tally.groups), "share"),
            "groups_alike": Measure(tally.alike, "groups"),
            "impossible_prefixes": Measure(tally.prefixed if tally.judged else None, "rows"),
            "impossible_prefixes_in_other_groups": Measure(tally.prefixed_across if tally.judged else None, "rows"),
            "longest_prefix": Measure(tally.longest or None, "tokens"),
            "resampled_prefixes": Measure(self._prefixes_again(tally), "prefixes"),
            "resampled_responses": Measure(self._again(tally)[0], "responses"),
            "replayed_responses": Measure(self._again(tally)[1], "responses"),
        }

    def _least(self, run: DuplicateTally) -> float:
        """Nats beyond which no copy is chance, however many pairs were compared."""
        return self.nats + log(max(run.all_pairs, run.pairs, 1.0))

    def _beyond_chance(self, run: DuplicateTally, copies: Mapping[str, float], pairs: float) -> int:
        """Copies beyond chance: each of them, or as many as there are of responses of so many nats.

        A row repeats an earlier one with a chance of at most exp(-nats), so that copies of such responses are bounded
        by a sum of independent draws with mean pairs x exp(-nats), and its upper tail by Chernoff.
        """
        least = self._least(run)
        found = run.beyond(copies, least)
        # A sampler that is sharper than the recorded log-probs say has copies of fewer nats.
        for nats in sorted(float(name) for name in copies if least / 2 <= float(name) < least):
            count, mean = run.beyond(copies, nats), max(pairs, 1.0) * exp(-nats)
            if count and count * log(count / mean) - count + mean > least:
                return max(found, count)
        return found

    def _again(self, run: DuplicateTally) -> tuple[int, int]:
        """Unlikely responses of the sample that come in several steps: with other log-probs, and with the same."""
        least, by_hash = self._least(run), dict[str, list[float]]()
        for name, value in run.sample.items():
            by_hash.setdefault(name.partition(":")[0], []).append(value)
        again = [values for values in by_hash.values() if len(values) > 1 and max(values) < -least]
        replayed = sum(len(set(values)) == 1 for values in again)
        return len(again) - replayed, replayed

    def _prefixes_again(self, run: DuplicateTally) -> int:
        """Unlikely prefixes that come in several steps with other log-probs: with the same they are one sample."""
        by_hash = dict[str, list[float]]()
        for name, value in run.prefixes.items():
            by_hash.setdefault(name.partition(":")[0], []).append(value)
        return sum(len(set(values)) > 1 for values in by_hash.values())

    def inconclusive_reason(self, run: DuplicateTally, context: Context) -> Missing | None:
        """Nothing to compare, or copies of which nothing says how likely they were."""
        if not run.rows:
            return Missing("no group has two responses with tokens", "widen --steps, or record whole groups")
        if not run.copied or run.judged or run.copied >= self.info_above * run.rows:
            return None
        name = SAMPLER[0]
        return Missing(
            f"{counted(run.copied, 'row')} repeat a response of their group, and no log-probs say how likely that was",
            context.recording.get(name, context.recording.get("*", f"record {name}")),
        )

    def unseen_reason(self, run: DuplicateTally, context: Context) -> Missing | None:
        """Responses so likely that copies of them would be chance."""
        if not run.judged or run.longest_odds >= self._least(run) / 2:
            return None
        return Missing(
            f"every response is likelier than exp(-{self._least(run) / 2:.0f}): copies of them may be chance",
            "look at a run with longer responses; the seeds of the requests are in the engine's log",
        )

    def judge(self, run: DuplicateTally, context: Context) -> Judgement | None:
        """An error where chance is out, a warning where temperature 0 is not, information otherwise."""
        least = self._least(run)
        inside = self._beyond_chance(run, run.copies, run.pairs)
        across = self._beyond_chance(run, run.across, run.all_pairs)
        resampled, replayed = self._again(run)
        if inside or across:
            return self._impossible(run, inside, across, least)
        size = f"{number(ratio(run.different, run.groups))} different responses in a group of "
        size += f"{number(ratio(run.rows, run.groups))}"
        # The trainer's log-probs of one sample change with its weights; the sampler's stay.
        if resampled and SAMPLER[0] in context.columns:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=f"{counted(resampled, 'response')} of {SAMPLE} come again in another step: no chance",
                message="the sampler gave the same response to the same prompt in several steps, token by token",
                evidence=f"log-probs that differ, so it was sampled again; chance of a copy below exp(-{least:.0f})",
                advice="look for a seed that is set again at every step, or a cache of responses in the engine",
            )
        prefixes = self._prefixes_again(run) if SAMPLER[0] in context.columns else 0
        if run.prefixed or run.prefixed_across or prefixes:
            return self._shared_prefixes(run, prefixes)
        if run.copied >= self.info_above * run.rows:
            expected = f"; independent draws would give {number(run.expected)}" if run.judged else ""
            return Judgement(
                severity=Severity.INFO,
                confirmed=True,
                headline=f"{percent(ratio(run.copied, run.rows))} of the rows repeat a response of their group: {size}",
                message=f"{counted(run.copied, 'row')} repeat a response of their group{expected}; "
                f"{counted(run.alike, 'group')} of {run.groups:,} have a single response",
                evidence="each of them is likely enough to come twice: short answers, or a policy that has collapsed"
                if run.judged
                else "no log-probs say whether this is chance, temperature 0 or a seed that repeats",
                advice="raise the temperature or the entropy bonus, or leave prompts out that have one answer"
                if run.judged
                else "record rollout_log_probs",
            )
        if replayed or resampled:
            return Judgement(
                severity=Severity.INFO,
                confirmed=True,
                headline=f"{counted(replayed + resampled, 'response')} of {SAMPLE} were trained on in several steps",
                message="the same responses to the same prompts are in several steps",
                evidence="equal tokens and log-probs: a replay buffer, or several updates for one generation"
                if not resampled
                else "equal tokens; only the sampler's log-probs would tell a replay buffer from a seed that repeats",
                advice="no action if the trainer reuses its rollouts",
            )
        return None

    def _shared_prefixes(self, run: DuplicateTally, again: int) -> Judgement:
        where = []
        if run.prefixed:
            where.append(f"{counted(run.prefixed, 'row')} begin as another response of their group")
        if run.prefixed_across:
            where.append(f"{counted(run.prefixed_across, 'row')} as one of another group of their prompt")
        if again:
            where.append(f"{counted(again, 'beginning')} of {PREFIXES} come again in another step")
        length = f", up to {run.longest:,.0f} tokens or more" if run.longest else ""
        alike = run.prefixed_groups == run.groups
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"{' and '.join(where)}{length}, which is not chance",
            message=f"{', '.join(where)}{length}, and goes on otherwise: "
            + ("temperature 0 with the noise of a kernel, or " if alike else "")
            + "requests share a seed and part where the engine's rounding differs, or begin with a cached response",
            evidence=f"the chance of each prefix is below exp(-{BEYOND:.0f}); prefixes that groups of different "
            "prompts share do not count",
            advice="give every request a seed of its own, on every rank and at every step, or none; no action if the "
            "sampler branches responses on purpose",
        )

    def _impossible(self, run: DuplicateTally, inside: int, across: int, least: float) -> Judgement:
        alike = inside > 0 and run.alike == run.groups
        where = []
        if inside:
            where.append(f"{counted(inside, 'row')} repeat a response of their group")
        if across:
            ranks = f", {run.other_ranks:,} of them on another rank" if run.other_ranks else ""
            where.append(f"{counted(across, 'response')} come again in another group of the step{ranks}")
        cause = "every request of a group has the same seed" if inside else "groups share a seed, or rows were mixed up"
        if across and run.other_ranks:
            cause = "ranks sample with the same seed"
        lost = f"{number(ratio(run.different, run.groups))} different responses in a group of "
        lost += f"{number(ratio(run.rows, run.groups))}"
        return Judgement(
            severity=Severity.WARNING if alike else Severity.ERROR,
            confirmed=not alike,
            headline=f"{' and '.join(where)}, which is not chance: {lost}",
            message=(
                f"{', '.join(where)}, token by token; "
                + ("temperature 0, or " if alike else "")
                + f"{cause}, or the engine answered from a cache"
            ),
            evidence=f"the chance of each copy, or of so many, is below exp(-{least:.0f}), the union bound over "
            f"{max(run.all_pairs, run.pairs):,.0f} pairs included"
            + ("; every group has a single response, as at temperature 0" if alike else ""),
            advice="give every request a seed of its own, on every rank, or none; look at the rows listed",
        )
