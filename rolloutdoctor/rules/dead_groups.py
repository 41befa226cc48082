"""RDA011: groups in which every response got the same reward."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.ops.tally import Sums, bottom_k, by_name, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

FEWEST_GROUPS = 8
"""Groups without a spread that are too many for chance, where there are no others."""

SAMPLE = 256
"""Prompts of a run that are followed across steps."""

LEAST_SHARE = 1e-6
"""Shares that differ by less do so by the rounding of float32."""

BINARY = ((0.0, 1.0), (-1.0, 1.0))
"""Values that a reward of right and wrong has."""


@dataclass(frozen=True)
class DeadTally(Sums):
    """What `dead-groups` adds up over training steps; groups are those of two or more scored rows.

    Attributes:
        groups: these groups.
        dead: those without a spread of rewards.
        lowest: of these, those at the lower end of the reward.
        highest: those at its upper end.
        rows: scored rows.
        binary: those whose reward is one of two ends, right or wrong.
        right: of these, right ones.
        sizes: groups by their number of scored rows.
        tokens: trained tokens of rows in these groups.
        live_tokens: those of them in groups with a spread.
        prompts: hash of a prompt, and step, to 1 if its group was dead, of some of them.
        logged_steps: steps that logged the trainer's own share.
        logged: sum of these shares.
        own: sum of the shares of dead groups in the same steps.
    """

    groups: int = 0
    dead: int = 0
    lowest: int = 0
    highest: int = 0
    rows: int = 0
    binary: int = 0
    right: int = 0
    sizes: Mapping[str, float] = by_name()
    tokens: int = 0
    live_tokens: int = 0
    prompts: Mapping[str, float] = bottom_k(SAMPLE)
    logged_steps: int = 0
    logged: float = 0.0
    own: float = 0.0

    @property
    def expected(self) -> float | None:
        """Share of dead groups where every response is right with the same chance; None for other rewards."""
        if not self.rows or self.binary < self.rows:
            return None
        right = self.right / self.rows
        dead = sum(count * (right ** float(size) + (1 - right) ** float(size)) for size, count in self.sizes.items())
        return ratio(dead, sum(self.sizes.values()))

    @property
    def always_dead(self) -> tuple[int, int]:
        """Prompts of the sample that came in several steps, and those of them that were dead in each."""
        by_prompt = dict[str, list[float]]()
        for name, dead in self.prompts.items():
            by_prompt.setdefault(name.partition(":")[0], []).append(dead)
        again = [values for values in by_prompt.values() if len(values) > 1]
        return len(again), sum(min(values) == 1 for values in again)


@dataclass(frozen=True)
class DeadGroups(Rule[DeadTally]):
    """Groups whose responses all got the same reward have no policy gradient.

    ## What it does
    Counts groups without a spread of rewards, at the lower end of the reward, at the upper end, and elsewhere, and the
    trained tokens that they take.

    ## Why it matters
    With equal rewards every advantage is 0: the responses were sampled and scored for nothing. Under a token mean they
    stay in the denominator, and the gradient of the other groups is diluted by `kappa`.

    ## How it is measured
    Rewards are compared exactly; a standard deviation of equal values need not be 0. `kappa` is the share of trained
    tokens in groups with a spread, the factor by which a token mean shrinks the gradient. `expected_share` is that of
    right-or-wrong rewards where every response is right with the run's mean chance p, p^G + (1 - p)^G: prompts that
    differ in difficulty have more, and so do responses that repeat each other (`RDI009`). `always_dead_share` is that
    of prompts which came in several steps and were dead in each, among 256 prompts chosen by their hash. Such groups
    are a property of the task and the policy, so this is information. A share that the trainer logs under its own
    definition (TRL: frac_reward_zero_std, which is about the standard deviation that divides: the batch's where that
    one does) is given beside the share of dead groups where the two differ.

    ## What to do
    Sample other prompts, larger groups, or until there is a spread (dynamic sampling); leave out prompts that are
    always dead. If no group of the run has a spread, look at the rewards of one prompt: from eight such groups on that
    is an error, since nothing trains the policy towards the reward.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDA011", toy_batch([[1, 0], [1, 1], [0, 0], [0, 1]]), trainer=None)
    'RDA011 info confirmed: dead_share 0.5'
    """

    code = "RDA011"
    name = "dead-groups"
    references = (
        "https://github.com/huggingface/trl/pull/3502",
        "https://github.com/huggingface/trl/issues/6365",
        "https://arxiv.org/abs/2503.14476",
    )
    tally = DeadTally
    needs_objective = False
    splits = ("train",)

    def columns(self, context: Context) -> frozenset[str]:
        """Rewards by group."""
        return frozenset({"reward", "group_id"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Trained tokens, and which prompts recur."""
        return frozenset({"response_mask"}) | prompt_columns(context.columns)

    def _dead(self, step: "StepView") -> "tuple[Tensor, Tensor, Tensor]":
        """Scored rows by group, and groups of two or more with equal rewards, ``[G]``; and scored rows, ``[N]``."""
        return step.cached(self.code, lambda: self._found(step))

    def _found(self, step: "StepView") -> "tuple[Tensor, Tensor, Tensor]":
        from rolloutdoctor.ops.group_stats import GroupStats

        scored_N = step.batch.per_row["reward"].isfinite()
        stats = GroupStats(step.groups, scored_N)
        return stats.count_G, (stats.count_G > 1) & (stats.spread(step.batch.per_row["reward"]) == 0), scored_N

    def measure_each(self, steps: "StepView") -> list[DeadTally]:
        """Count the groups of each step."""
        import numpy as np
        import torch

        from rolloutdoctor.ops.by_step import named_counts

        batch, groups, by_step = steps.batch, steps.groups_by_step, steps.by_step
        count_G, dead_G, scored_N = self._dead(steps)
        full_G, index_N = count_G > 1, steps.groups.index_N
        inside_N = scored_N & full_G[index_N]
        inside, known_n = by_step.only(inside_N), batch.per_row["reward"][inside_N]
        is_binary = [inside.all((known_n == low) | (known_n == high)) & (inside.size > 0) for low, high in BINARY]
        low = np.select(is_binary, [low for low, _ in BINARY], inside.low(known_n))
        high = np.select(is_binary, [high for _, high in BINARY], inside.high(known_n))
        # A GPU has no fixed order of writes, whatever is written.
        value_G = torch.full_like(count_G, torch.nan, device="cpu")
        value_G[index_N[inside_N].cpu()] = known_n.cpu()
        value_G = value_G.to(count_G.device)
        low_G, high_G = (groups.expand(end) for end in (low, high))
        has_ends_G = dead_G & (low_G < high_G)
        tokens = live = np.zeros(len(by_step), np.int64)
        if "response_mask" in batch.per_token:
            tokens_N = batch.trained.diff()
            tokens = by_step.count(tokens_N * inside_N)
            live = by_step.count(tokens_N * (inside_N & ~dead_G[index_N]))
        size_G = (count_G * full_G).long().cpu().numpy()
        sizes = groups.histogram(size_G, int(size_G.max(initial=0)) + 1)
        return steps.tallies(
            DeadTally,
            groups=groups.count(full_G),
            dead=groups.count(dead_G),
            lowest=groups.count(has_ends_G & (value_G == low_G)),
            highest=groups.count(has_ends_G & (value_G == high_G)),
            rows=inside.size,
            binary=np.where(np.any(is_binary, axis=0), inside.size, 0),
            right=np.where(np.any(is_binary, axis=0), inside.count(known_n == 1), 0),
            sizes=[{size: n for size, n in one.items() if size != "0"} for one in named_counts(sizes)],
            tokens=tokens,
            live_tokens=live,
            prompts=self._prompts(steps, full_G, dead_G),
            **self._logged(steps, groups.count(full_G), groups.count(dead_G)),
        )

    def _logged(self, steps: "StepView", full: "NDArray[np.int64]", dead: "NDArray[np.int64]") -> dict[str, list[Any]]:
        """The trainer's own share of each step that logged one, and that of its dead groups."""
        name = None if steps.writer is None else steps.writer.zero_std_metric
        shares = [
            each.logged.get(name) if name and count else None for each, count in zip(steps.each, full, strict=True)
        ]
        return {
            "logged_steps": [int(share is not None) for share in shares],
            "logged": [share or 0.0 for share in shares],
            "own": [0.0 if one is None else float(n / of) for one, n, of in zip(shares, dead, full, strict=True)],
        }

    def _prompts(self, steps: "StepView", full_G: "Tensor", dead_G: "Tensor") -> list[dict[str, float]]:
        """Some prompts of each step, by hash and step; 1 where all of their groups are dead."""
        from rolloutdoctor.ops.kept_keys import kept_keys
        from rolloutdoctor.ops.prefix_hash import scramble

        prompts_N = steps.batch.prompts
        if prompts_N is None:
            return [{} for _ in steps.each]
        index_N = steps.groups.index_N
        known_N = full_G[index_N] & (prompts_N != 0)
        return kept_keys(
            scramble(prompts_N[known_N]),
            dead_G[index_N[known_N]].double(),
            steps.by_step.only(known_N),
            steps.batch.step_numbers,
            SAMPLE,
            largest=False,
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Dead groups with most rows."""
        count_G, dead_G, _ = self._dead(step)
        starts = step.groups.order_N[step.groups.offsets[:-1]]
        reward_N = step.batch.per_row["reward"]

        def note(group: int) -> str:
            return f"{int(count_G[group])} rewards of {number(float(reward_N[starts[group]]))}"

        return step.worst_groups(count_G * dead_G, note, KEEP_EXAMPLES)

    def measures(self, tally: DeadTally) -> Mapping[str, Measure]:
        """How many groups, and what they take."""
        again, always = tally.always_dead
        live = ratio(tally.live_tokens, tally.tokens)
        return {
            "dead_share": Measure(ratio(tally.dead, tally.groups), "share"),
            "dead_groups": Measure(tally.dead, "groups"),
            "lowest_groups": Measure(tally.lowest, "groups"),
            "highest_groups": Measure(tally.highest, "groups"),
            "other_groups": Measure(tally.dead - tally.lowest - tally.highest, "groups"),
            "expected_share": Measure(tally.expected, "share"),
            "kappa": Measure(live, "1"),
            "groups_per_live_group": Measure(ratio(tally.groups, tally.groups - tally.dead), "groups"),
            "always_dead_share": Measure(ratio(always, again), "share"),
            "logged_share": Measure(ratio(tally.logged, tally.logged_steps), "share"),
        }

    def inconclusive_reason(self, run: DeadTally, context: Context) -> Missing | None:
        """No group of two scored rows."""
        if run.groups:
            return None
        return Missing("no group has two rows with a reward", "widen --steps, or record whole groups")

    def judge(self, run: DeadTally, context: Context) -> Judgement | None:
        """Information, as the task and the policy make them; an error where there is no other group."""
        if not run.dead:
            return None
        if run.dead == run.groups >= FEWEST_GROUPS:
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=f"all {run.groups:,} groups have equal rewards: no response is preferred to another",
                message=f"in none of {counted(run.groups, 'group')} ({counted(run.rows, 'response')}) do two responses "
                f"differ in reward: {run.lowest:,} at the lowest reward, {run.highest:,} at the highest, "
                f"{run.dead - run.lowest - run.highest:,} elsewhere",
                evidence="the rewards of the rows, compared exactly",
                advice="look at the rewards of one prompt: a reward function that is constant, a parser that finds no "
                "answer, or prompts that are all solved or all out of reach",
            )
        other = run.dead - run.lowest - run.highest
        kappa, expected = ratio(run.live_tokens, run.tokens), run.expected
        again, always = run.always_dead
        message = f"{run.lowest:,} at the lowest reward, {run.highest:,} at the highest, {other:,} elsewhere"
        if kappa is not None:
            message += f"; {percent(kappa)} of the trained tokens are in groups with a spread"
            token_mean = context.objective is not None and context.objective.aggregation.mode == "token-mean"
            message += f", so the token mean shrinks their gradient by {number(kappa)}" if token_mean else ""
        if expected is not None:
            message += f"; prompts of equal difficulty would give {percent(expected)}"
        if again:
            message += f"; {always:,} of {counted(again, 'prompt')} that came again were dead each time"
        name = None if context.writer is None else context.writer.zero_std_metric
        if name and run.logged_steps and abs(run.logged - run.own) > LEAST_SHARE * run.logged_steps:
            message += (
                f"; {name} logs {percent(run.logged / run.logged_steps)} for {percent(run.own / run.logged_steps)}: it "
                "counts something else than groups with equal rewards"
            )
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"{percent(ratio(run.dead, run.groups))} of {counted(run.groups, 'group')} have equal rewards",
            message=message,
            evidence="the rewards of the rows, compared exactly",
            advice="sample other prompts, larger groups, or until there is a spread (dynamic sampling)",
        )
