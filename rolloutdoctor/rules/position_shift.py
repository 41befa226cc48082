"""RDO011: positions that count the padding of a micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb, inf, log2, sqrt
from typing import TYPE_CHECKING, Any

from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.ops.change import median
from rolloutdoctor.ops.tally import Sums, by_name, by_step, ratio
from rolloutdoctor.results.findings import Excluded, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.ops.by_step import Floats
    from rolloutdoctor.rules.step import StepView


ADVICE = "give the trainer position ids and an attention mask that leave padding out, or pack without it"


@dataclass(frozen=True)
class ShiftTally(Sums):
    """What `position-shift` adds up, by step.

    Attributes:
        known: rows of the run whose left padding is known.
        rows: rows with enough tokens, of steps with enough of them.
        padded: those with left padding.
        correlation: Spearman's, of the mean gap of a row and its left padding.
        less_response: the same, the length of the response partialled out.
        less_prompt: the same, the length of the prompt partialled out.
        gap: median over rows without left padding of their mean gap.
        gap_padded: median over rows whose padding is above the median of the padded ones.
        padding: median padding of these.
        moments: sums of p^i g^j, named ``ij``, of padding p and gap g of each row less what a line in the lengths of
            prompt and response gives; ``freedom`` counts the degrees of freedom that are left.
        mixed: steps of the run with rows of both kinds, of four tokens or more.
        apart: step to how unlikely it is, in bits, that all padded rows have larger gaps than all others, where they
            do and their median is five times that of the others.
        apart_plain: median of the rows without padding of these steps.
        apart_padded: of those with padding.
    """

    known: int = 0
    rows: Mapping[str, float] = by_name()
    padded: Mapping[str, float] = by_name()
    correlation: Mapping[str, float] = by_name()
    less_response: Mapping[str, float] = by_name()
    less_prompt: Mapping[str, float] = by_name()
    gap: Mapping[str, float] = by_name()
    gap_padded: Mapping[str, float] = by_name()
    padding: Mapping[str, float] = by_name()
    moments: Mapping[str, float] = by_name()
    mixed: int = 0
    apart: Mapping[str, float] = by_step()
    apart_plain: Mapping[str, float] = by_step()
    apart_padded: Mapping[str, float] = by_step()

    @property
    def bits(self) -> float:
        """How unlikely the steps are in which padding alone decides which rows have large gaps."""
        return sum(bits - log2(self.mixed) for bits in self.apart.values())


@dataclass(frozen=True)
class PositionShift(Rule[ShiftTally]):
    """The gap of sampler and trainer grows with a row's left padding in its micro-batch.

    ## What it does
    Correlates the mean gap of each row with its left padding: how much shorter its prompt is than the longest of its
    micro-batch.

    ## Why it matters
    A trainer whose positions count the padding, or whose attention sees it, scores a short prompt's response as if it
    stood elsewhere; the engine, which packs or pads on the other side, does not. Rows without padding are right, so
    that the mean over a step looks like noise. A shift by the same number for all tokens does not change a model with
    relative positions: only where padding is seen, or positions are absolute or split, it shows.

    ## How it is measured
    The gap is the mean of its sizes on trained tokens with a sampler probability below 0.9, of eight or more in a row.
    In each step of 16 rows or more with five without padding and eight with it, Spearman's correlation of gap and left
    padding, and the same with the length of the response, and of the prompt, partialled out: gaps that grow with
    length grow with padding too, and a long prompt has little of it. Found where the medians over steps are 0.5 with
    and without the response's length and 0.3 without the prompt's, and the most padded rows have twice the gap of
    rows without padding. Found as well where in some steps every padded row, of four such tokens or more, has a larger
    gap than every other row, and the median of the padded ones is five times that of the others: of rows that chance
    divides, that has a probability of 2^-20 or less over all steps with both kinds. Clean excludes a slope, the lengths
    of prompt and response partialled out, that would make it so: its upper bound comes from errors that need not be
    equal from row to row.

    ## What to do
    Give the trainer position ids and an attention mask that leave the padding out, or pack without padding.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO011", toy_batch([[1, 0]], rollout=-1.0), trainer=None)
    'RDO011 skipped: missing columns micro_batch_id, prompt_ids'
    """

    code = "RDO011"
    name = "position-shift"
    references = (
        "https://github.com/unslothai/unsloth/pull/6738",
        "https://github.com/huggingface/trl/issues/6800",
    )
    tally = ShiftTally
    needs_objective = False
    splits = ("train",)

    least_rows: int = 16
    level: float = 0.5
    level_less_prompt: float = 0.3
    factor: float = 2.0
    factor_alone: float = 10.0
    least_alone: float = 1e-3
    factor_apart: float = 5.0
    least_bits: float = 20.0

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs, the micro-batches and the prompts' lengths."""
        return frozenset({"old_log_probs", "rollout_log_probs", "micro_batch_id", "prompt_ids"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, and what else tells micro-batches apart."""
        return frozenset({"response_mask", "optim_step_id", "rank"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Keep the tokens that are looked at."""
        from rolloutdoctor.evaluation.sampler_gap import looked_at

        return looked_at(block)

    def measure_each(self, steps: "StepView") -> list[ShiftTally]:
        """Correlate the rows of each step."""
        from rolloutdoctor.data.batch import PROMPT_LENGTH

        rows, padding_N, by_step = steps.unsure_gaps(self.code), _padding(steps), steps.by_step
        if not rows or padding_N is None:
            return steps.nothing(ShiftTally)
        is_seen_N = (rows["unsure"] >= 8) & (padding_N >= 0)
        size = by_step.count(is_seen_N)
        padded = by_step.count(is_seen_N & (padding_N > 0))
        is_enough = (size >= self.least_rows) & (size - padded >= 5) & (padded >= 8)
        found: dict[str, Any] = {"rows": size, "padded": padded}
        moments: list[Mapping[str, float]] = [{} for _ in steps.each]
        if is_enough.any():
            is_seen_N = is_seen_N & by_step.expand(is_enough)
            length_N, prompt_N = steps.batch.rows.diff(), steps.batch.per_row[PROMPT_LENGTH]
            each_N = rows["size"] / rows["unsure"], padding_N, length_N, prompt_N
            gap, padding, response, prompt = (x_N[is_seen_N].double().cpu().numpy() for x_N in each_N)
            sizes = by_step.count(is_seen_N)
            found |= _correlations(gap, padding, response, prompt, sizes)
            moments = _moments(gap, padding, response, prompt, sizes)
        found |= self._apart(steps, rows, padding_N)
        return steps.tallies(
            ShiftTally,
            known=by_step.count(padding_N >= 0),
            moments=moments,
            **{name: x if isinstance(x, list) else steps.by_number(x, is_enough) for name, x in found.items()},
        )

    def _apart(self, steps: "StepView", rows: "Mapping[str, Tensor]", padding_N: "Tensor") -> dict[str, Any]:
        """Steps in which all padded rows have larger gaps than the others, by far."""
        import numpy as np

        known_N = rows["unsure"] >= 4
        gap_N = rows["size"] / rows["unsure"].clamp(min=1)
        sides = [known_N & (padding_N == 0), known_N & (padding_N > 0)]
        plain, padded = (steps.by_step.only(side_N) for side_N in sides)
        gaps = [gap_N[side_N].double() for side_N in sides]
        is_mixed = (plain.size > 0) & (padded.size > 0)
        low, high = plain.median(gaps[0].cpu().numpy()), padded.median(gaps[1].cpu().numpy())
        is_apart = is_mixed & (padded.low(gaps[1]) > plain.high(gaps[0]))
        is_apart &= (high >= self.factor_apart * low) & (high >= self.least_alone)
        sizes = zip(plain.size.tolist(), padded.size.tolist(), strict=True)
        bits = np.array([log2(comb(one + other, one)) for one, other in sizes])
        of_steps = {"apart": bits, "apart_plain": low, "apart_padded": high}
        by_number = {name: steps.by_number(x, is_apart) for name, x in of_steps.items()}
        return {"mixed": is_mixed.astype(int).tolist(), **by_number}

    def measures(self, tally: ShiftTally) -> Mapping[str, Measure]:
        """The correlations, and the gap of rows with and without padding."""
        found = {
            name: None if not values else median(values.values())
            for name, values in (
                ("correlation", tally.correlation),
                ("correlation_less_response", tally.less_response),
                ("correlation_less_prompt", tally.less_prompt),
            )
        }
        gap, padded = ({**each} for each in (tally.gap, tally.gap_padded))
        return {
            **{name: Measure(value, "1") for name, value in found.items()},
            "gap_without_padding": Measure(median(gap.values()) if gap else None, "nats"),
            "gap_padded": Measure(median(padded.values()) if padded else None, "nats"),
            "rows": Measure(sum(tally.rows.values()), "rows"),
            "padded_rows": Measure(sum(tally.padded.values()), "rows"),
        }

    def inconclusive_reason(self, run: ShiftTally, context: Context) -> Missing | None:
        """No step has rows with padding and rows without."""
        if run.rows or run.bits >= self.least_bits:
            return None
        return Missing(
            f"no step has {self.least_rows} rows in micro-batches of prompts of different lengths",
            "record more rows of each step",
        )

    def excluded(self, run: ShiftTally, context: Context) -> Excluded | None:
        """How steeply the gap may grow with padding; twice the gap at much padding would be found."""
        of, rows = run.moments, int(sum(run.rows.values()))
        slope, square = ratio(of["11"], of["20"]), of["20"]
        error = inf
        if slope is not None and of["freedom"] > 0:
            meat = max(of["22"] - 2 * slope * of["31"] + slope**2 * of["40"], 0.0)
            error = sqrt(meat * rows / of["freedom"]) / square
        return Excluded(
            code=self.code,
            effect="a rise of the gap",
            bound=100 * ((slope or 0.0) + reach(error, of["freedom"])),
            unit="nats per 100 tokens of left padding",
            estimate=100 * (slope or 0.0),
            limit=100
            * max((self.factor - 1) * median(run.gap.values()), self.least_alone)
            / median(run.padding.values()),
            seen=rows,
            of="rows",
        )

    def judge(self, run: ShiftTally, context: Context) -> Judgement | None:
        """A warning: the log-probs show it, and no logged value proves it."""
        if run.bits >= self.least_bits:
            return self._of_apart(run)
        if not run.rows:
            return None
        whole, response, prompt = (
            median(each.values()) for each in (run.correlation, run.less_response, run.less_prompt)
        )
        plain, padded = median(run.gap.values()), median(run.gap_padded.values())
        goes = min(whole, response) >= self.level and prompt >= self.level_less_prompt and padded >= self.factor * plain
        if not goes and (padded < self.factor_alone * plain or padded < self.least_alone):
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the gap to the sampler goes with the left padding of a row (Spearman {whole:.2f}): "
            f"{number(plain)} nats without, {number(padded)} with much of it",
            message=(
                f"in {counted(len(run.rows), 'step')} the gap of a row goes with its left padding in the micro-batch: "
                f"Spearman {whole:.2f}, with the length of the response partialled out {response:.2f}, with that of "
                f"the prompt {prompt:.2f}"
            ),
            evidence="the log-probs of sampler and trainer, the prompts' lengths and the micro-batches",
            advice=ADVICE,
        )

    def _of_apart(self, run: ShiftTally) -> Judgement:
        plain, padded = median(run.apart_plain.values()), median(run.apart_padded.values())
        steps = f"{counted(len(run.apart), 'step')} of {run.mixed:,}"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the gap to the sampler is {number(plain)} nats in rows without left padding and "
            f"{number(padded)} in all others, in {steps}",
            message=f"in {steps} every row with left padding in its micro-batch has a larger gap than every row "
            f"without: {number(padded)} nats (median) against {number(plain)}",
            evidence=f"chance would divide the rows so with a probability of 2^-{run.bits:.0f}",
            advice=ADVICE,
        )


def _correlations(
    gap: "Floats", padding: "Floats", response: "Floats", prompt: "Floats", sizes: "NDArray[np.int64]"
) -> "dict[str, Floats]":
    """How the mean gap of the rows of each step goes with their padding, ``[n] -> [S]``.

    Args:
        gap: mean gap of each row.
        padding: left padding.
        response: length of the response.
        prompt: length of the prompt.
        sizes: how many of these rows each step has, ``[S]``.
    """
    from rolloutdoctor.ops.by_step import ByStep
    from rolloutdoctor.ops.ranks import StepRanks

    by_step = ByStep.of_sizes(sizes)
    ranks = StepRanks(by_step)
    gap_rank, padding_rank, response_rank, prompt_rank = map(ranks.centred, (gap, padding, response, prompt))
    is_plain, is_padded = padding == 0, padding > 0
    much = by_step.only(is_padded).median(padding[is_padded])
    has_much = padding >= by_step.expand(much).numpy()
    return {
        "correlation": ranks.correlation(gap_rank, padding_rank),
        "less_response": ranks.partial_correlation(gap_rank, padding_rank, response_rank),
        "less_prompt": ranks.partial_correlation(gap_rank, padding_rank, prompt_rank),
        "gap": by_step.only(is_plain).median(gap[is_plain]),
        "gap_padded": by_step.only(has_much).median(gap[has_much]),
        "padding": by_step.only(has_much).median(padding[has_much]),
    }


def _moments(
    gap: "Floats", padding: "Floats", response: "Floats", prompt: "Floats", sizes: "NDArray[np.int64]"
) -> list[Mapping[str, float]]:
    """Sums of the `moments` of a tally for each step; arguments as of `_correlations`."""
    import numpy as np

    found: list[Mapping[str, float]] = []
    for stop, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
        here = slice(stop - size, stop)
        lines = np.stack([np.ones(size), response[here], prompt[here]], 1)
        both = np.stack([padding[here], gap[here]], 1)
        p, g = (both - lines @ np.linalg.lstsq(lines, both)[0]).T if size else both.T
        # In a single micro-batch the padding is a line in the prompt.
        p = p * (p @ p > 1e-9 * (padding[here] @ padding[here]))
        sums = {f"{i}{j}": float((p**i * g**j).sum()) for i, j in ((2, 0), (1, 1), (2, 2), (3, 1), (4, 0))}
        found.append({**sums, "freedom": float(max(size - 4, 0)) if size else 0.0})
    return found


def _padding(steps: "StepView") -> "Tensor | None":
    """Left padding of each row in its micro-batch, ``[N]``; -1 where it is not known, None without columns."""
    import torch

    from rolloutdoctor.data.batch import PROMPT_LENGTH

    batch = steps.batch
    length_N = batch.per_row.get(PROMPT_LENGTH)
    if length_N is None or "micro_batch_id" not in batch.per_row or not len(batch):
        return None
    parts = [batch.per_row[name] for name in ("optim_step_id", "rank", "micro_batch_id") if name in batch.per_row]
    parts.append(steps.by_step.step_N)
    micro_N = torch.unique(torch.stack(parts, 1), dim=0, return_inverse=True)[1]
    longest_M = torch.zeros(int(micro_N.max()) + 1, dtype=length_N.dtype, device=length_N.device)
    longest_M.scatter_reduce_(0, micro_N, length_N, "amax")
    is_known_N = (length_N >= 0) & (batch.per_row["micro_batch_id"] >= 0)
    return torch.where(is_known_N, longest_M[micro_N] - length_N, -1)
