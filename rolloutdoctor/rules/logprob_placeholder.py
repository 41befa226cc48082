"""RDI005: numbers that stand for log-probs that nobody computed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

SIDES = {"sampler": "rollout_log_probs", "trainer": "old_log_probs"}

KINDS = ("0.0", "1.0", "-1.0", "-1000 or less", "above 0")

APART = 0.75
"""Nats by which the other log-prob must differ: more than top-p 0.5 does to a token that it keeps alone."""

LOWEST, HIGHEST = -1000.0, 0.05
"""A sentinel; and what a bfloat16 log-softmax may be above 0."""

TAIL = 3


@dataclass(frozen=True)
class PlaceholderTally(Sums):
    """What `logprob-placeholder` adds up.

    Attributes:
        tokens: trained tokens with both log-probs.
        found: placeholder, such as ``sampler:0.0``, to tokens.
        certain: side to tokens of a log-prob between -0.01 and 0 where the other differs as much.
        rows: rows with a placeholder or an equal tail.
        tails: side to rows that end with three equal log-probs where the other's differ.
        sampled: sampled tokens.
        zeros: those of them with a log-prob of exactly 0 from the sampler.
        weight: sum of the importance weights of sampled tokens.
        placeholder_weight: of those with a placeholder.
    """

    tokens: int = 0
    found: Mapping[str, float] = by_name()
    certain: Mapping[str, float] = by_name()
    rows: int = 0
    tails: Mapping[str, float] = by_name()
    sampled: int = 0
    zeros: int = 0
    weight: float = 0.0
    placeholder_weight: float = 0.0

    def kinds(self, least: int) -> dict[str, float]:
        """Placeholders that occur often enough, and to which no certain model leads."""
        return {
            name: count
            for name, count in self.found.items()
            if count >= least
            and not (name.endswith(":0.0") and count < 3 * self.certain.get(name.partition(":")[0], 0.0))
        }


@dataclass(frozen=True)
class LogProbPlaceholder(Rule[PlaceholderTally]):
    """Placeholders stand for log-probs that were never computed: 0.0, 1.0, -1.0 or -9999.

    ## What it does
    Finds trained tokens with a log-prob of exactly 0.0, 1.0 or -1.0, of -1000 or less, or above 0, where the other
    engine's says something else; and rows that end with the same log-prob three times.

    ## Why it matters
    Engines give no log-prob for tokens that were appended by hand, tokenised anew or lost. Filled with 0.0, a token of
    true log-prob -10.8 has a ratio that is off by 4.8e4: it takes its part out of the update, or a mean ratio over.

    ## How it is measured
    Only exact values count, on tokens whose two log-probs are 0.75 nats apart or more: engines return exactly 0.0
    where p is 1 within float32, top-p returns it for a token that it keeps alone, and a policy that collapsed has
    nothing else. Found from three tokens of one kind. Zeros do not count unless they are three times as many as such
    tokens with a log-prob between -0.01 and 0: an engine of stale weights is certain and wrong on both. `weight_share`
    is the part of the placeholders in the sum of the importance weights exp(delta), delta within +-20, over sampled
    rows. An error for values that no log-prob can have; a warning for 0.0 and -1.0, which a model could give by
    chance.

    ## What to do
    Record NaN where the engine gave none, and leave such tokens out of the mask or give them a ratio of 1.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> rollout = [[-2.1, -1.4, 0.0, 0.0], [-2.0, -1.3, -1.9, 0.0]]
    >>> diagnose_one("RDI005", toy_batch([[1, 0]], policy=-2.0, rollout=rollout), trainer=None)
    'RDI005 warning confirmed: tokens 3'
    """

    code = "RDI005"
    name = "logprob-placeholder"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/pull/4218",
        "https://github.com/vllm-project/vime/pull/70",
        "https://github.com/huggingface/trl/issues/2496",
    )
    tally = PlaceholderTally
    needs_objective = False
    splits = ("train",)

    least_tokens: int = 3

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs: a value alone is no evidence."""
        return frozenset({"rollout_log_probs", "old_log_probs"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask."""
        return frozenset({"response_mask"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the placeholders of each row, and keep the place of the first."""
        import torch

        from rolloutdoctor.evaluation.sampled_rows import gap_of
        from rolloutdoctor.ops.elementwise import outside

        gap = gap_of(block)
        if gap is None:
            return {}
        kinds = torch.zeros(len(block.runs), len(SIDES) * (len(KINDS) + 1), dtype=torch.float64)
        first = torch.full((len(block.runs),), -1, dtype=torch.int64)
        # The extremes settle it for nearly every healthy block.
        is_apart = gap.low < -APART or gap.high > APART
        places = outside(gap.apart_T, -APART, APART) if is_apart else None
        tails = torch.zeros(len(block.runs), len(SIDES), dtype=torch.bool)
        if places is not None:
            row = torch.searchsorted(block.runs.offsets, places, right=True) - 1
            _tails(block, row[places >= block.runs.offsets[1:][row] - TAIL], tails)
            for side, name in enumerate(SIDES.values()):
                found = _kinds(block.column(name)[places])
                for kind, which in enumerate(found):
                    counts = torch.bincount(row[which], minlength=len(kinds)).double().cpu()
                    kinds[:, side * (len(KINDS) + 1) + kind] = counts
                held = torch.stack(found[:-1]).any(0)
                # The last that is written stays: from the end on, the first.
                at = row[held].flip(0).cpu(), (places[held] - block.runs.offsets[row[held]]).flip(0).cpu()
                first[at[0]] = torch.where(first[at[0]] < 0, at[1], torch.minimum(first[at[0]], at[1]))
        return {**gap.sampled, "count": gap.count_N, "kinds": kinds, "first": first, "tails": tails}

    def measure_each(self, steps: "StepView") -> list[PlaceholderTally]:
        """Add up the rows of each step."""
        import numpy as np
        import torch

        from rolloutdoctor.ops.by_step import named_counts

        sample = steps.sample(self.code)
        if sample is None:
            return steps.nothing(PlaceholderTally)
        measured = steps.token_measures[self.code]
        by_step, tails_N = steps.by_step.cpu, measured["tails"]
        # Of each side the kinds, and last the tokens of which a model was certain.
        kinds = by_step.sum(measured["kinds"]).reshape(len(by_step), len(SIDES), -1)
        apart = np.flatnonzero(sample.size >= APART)
        pair = [torch.from_numpy(values[apart]) for values in (sample.sampler, sample.trainer)]
        held = apart[torch.stack([which for values in pair for which in _kinds(values)[:-1]]).any(0).numpy()]
        return steps.tallies(
            PlaceholderTally,
            tokens=steps.by_step.count(measured["count"]),
            found=named_counts(
                kinds[:, :, :-1].reshape(len(by_step), -1), [f"{side}:{kind}" for side in SIDES for kind in KINDS]
            ),
            certain=named_counts(kinds[:, :, -1], [*SIDES]),
            rows=by_step.count((measured["first"] >= 0) | tails_N.any(1)),
            tails=named_counts(by_step.sum(tails_N.double()), [*SIDES]),
            sampled=sample.tokens_by_step.size,
            zeros=sample.tokens_by_step.count(sample.sampler == 0),
            weight=sample.weights,
            placeholder_weight=sample.tokens_by_step.at(held).sum(sample.weight[held]),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows with most placeholders."""
        measured, batch = step.token_measures.get(self.code), step.batch
        if not measured or not len(batch):
            return ()
        first = measured["first"]
        kinds = measured["kinds"].reshape(len(batch), len(SIDES), -1)[:, :, :-1].sum((1, 2))

        def note(row: int) -> str:
            token = int(first[row])
            start = int(batch.rows[row]) + token
            pair = [float(batch.tokens_of(name, slice(start, start + 1))[0]) for name in SIDES.values()]
            return f"log-probs {pair[0]:.4g} of the sampler and {pair[1]:.4g} of the trainer at token {token}"

        return step.worst_rows(kinds * (first >= 0), note, KEEP_EXAMPLES)

    def measures(self, tally: PlaceholderTally) -> Mapping[str, Measure]:
        """How many, and how much of the weights."""
        total = sum(tally.found.values())
        return {
            "tokens": Measure(int(total), "tokens"),
            "tokens_share": Measure(ratio(total, tally.tokens), "share"),
            "rows": Measure(tally.rows, "rows"),
            "equal_tails": Measure(int(sum(tally.tails.values())), "rows"),
            "weight_share": Measure(ratio(tally.placeholder_weight, tally.weight), "share"),
            "zero_share": Measure(ratio(tally.zeros, tally.sampled), "share"),
        }

    def inconclusive_reason(self, run: PlaceholderTally, context: Context) -> Missing | None:
        """Nothing to compare."""
        if run.tokens:
            return None
        return Missing("no trained token has a log-prob of both", "record the sampler's log-probs for trained tokens")

    def judge(self, run: PlaceholderTally, context: Context) -> Judgement | None:
        """An error for sentinels, a warning for the others."""
        kinds = run.kinds(self.least_tokens)
        tails = {side: rows for side, rows in run.tails.items() if rows >= self.least_tokens}
        if not kinds and not tails:
            return None
        parts = []
        for name, count in sorted(kinds.items(), key=lambda one: -one[1]):
            side, _, kind = name.partition(":")
            parts.append(f"{counted(count, 'log-prob')} of the {side} {'is' if count == 1 else 'are'} {kind}")
        parts += [f"{counted(rows, 'row')} end with equal log-probs of the {side}" for side, rows in tails.items()]
        impossible = any(name.partition(":")[2] in ("1.0", "-1000 or less") for name in kinds)
        share = ratio(run.placeholder_weight, run.weight)
        total = sum(kinds.values())
        everywhere = ratio(run.zeros, run.sampled) or 0.0
        return Judgement(
            severity=Severity.ERROR if impossible else Severity.WARNING,
            confirmed=True,
            headline=f"{counted(total, 'trained token')} in {counted(run.rows, 'row')} with a placeholder for a "
            "log-prob"
            if kinds
            else f"{counted(sum(tails.values()), 'row')} that end with the same log-prob again and again",
            message="; ".join(parts)
            + f", where the other engine's is {APART:g} nats away or more; they have {percent(share)} of the sum of "
            "the "
            "importance weights",
            evidence="the values are in the file"
            + (
                f"; {percent(everywhere)} of the sampler's are exactly 0: greedy sampling, or log-probs never recorded"
                if everywhere > 0.9
                else f"; {percent(ratio(total, run.tokens))} of the trained tokens, {number(total / run.rows)} a row"
            ),
            advice="record NaN where the engine gave none, and mask these tokens or give them a ratio of 1",
        )


def _kinds(x: "Tensor") -> "list[Tensor]":
    """Which values are placeholders of each kind, and last which say that a model was certain."""
    positive = x > HIGHEST
    return [x == 0, x == 1, x == -1, x <= LOWEST, positive & (x != 1), (x < 0) & (x > -0.01)]


def _tails(block: "TokenBlock", rows: "Tensor", found: "Tensor") -> None:
    """Mark rows that end with equal log-probs of each side where the other's differ, in ``[n, 2]`` bool.

    Args:
        block: the rows.
        rows: those that end with a token whose log-probs are far apart.
        found: is written to.
    """
    import torch

    rows = torch.unique(rows)
    rows = rows[block.runs.lengths[rows] >= TAIL]
    at = block.runs.offsets[1:][rows, None] - torch.arange(1, TAIL + 1, device=rows.device)
    pair = [block.column(name)[at] for name in SIDES.values()]
    trained = block.trained_T[at].all(1)
    equal = [trained & (x == x[:, :1]).all(1) & (x[:, 0] != 0) for x in pair]
    found[rows.cpu()] = torch.stack([equal[0] & ~equal[1], equal[1] & ~equal[0]], 1).cpu()
