"""RDO001: how far the sampler's log-probs are from the trainer's, and what importance weights make of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

from rolloutdoctor.ops.mismatch_tally import (
    FAR,
    OFTEN_KEPT,
    PLACES,
    ROW_BAND,
    ROW_CAP,
    TOKEN_BAND,
    TOKEN_CAP,
    MismatchTally,
)
from rolloutdoctor.ops.tally import ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.sampled_rows import LoggedGap, Sample
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

LAGS = 8
"""Version lags that are told apart."""

SURE, APART = log(0.5), 2.0
"""A token that the sampler gave one half or more, and the trainer two nats less."""


@dataclass(frozen=True)
class SamplerMismatch(Rule[MismatchTally]):
    """How far the sampler's log-probs are from the trainer's.

    ## What it does
    Describes delta, the trainer's log-prob before the update minus the sampler's, on trained tokens, and what
    importance weights exp(delta) at the usual caps would keep. Warns of two things alone: tokens that the sampler was
    sure of and the trainer was not, and rows that are far apart where the others agree.

    ## Why it matters
    Kernels, precision and parallelism differ between an inference engine and a trainer, so that training is never
    quite on-policy. Means hide it: a mean of -0.0015 went with 7.5 % of the tokens outside of 0.9 to 1.1 upstream. How
    much is too much depends on model and stack, so no level is a fault; a cause is, and rules on causes look for them.

    ## How it is measured
    Means, shares and weights are those of sampled rows, about 2^13 tokens of each step; `tokens` counts all. `p99_abs`
    is the centre of a bin of a fourth of a doubling. `ess_share` = (sum w)^2 / (n sum w^2) is the effective sample
    size as a share of the tokens; `k3` = mean of exp(delta) - 1 - delta, the KL of sampler and trainer. For weights of
    tokens cut at 2 and for a mask of 0.5 to 5, `..._mass_share` is what is left of the sum of weights, `..._ess_share`
    the effective sample size, and `..._kappa` = sum w / sum w^2 how much larger the update without weights is than the
    one with, taking advantages as independent of w. Weights of rows are products over tokens, cut at 3; the geometric
    mean is held to 0.999 to 1.001. Version lag is how many versions the oldest part of a row is behind the newest of
    its step.

    Confident disagreement: the sampler gave the token at least one half and the trainer at most e^-2 of that, in a row
    of the newest version of its step. Noise of a kernel moves a log-prob by its size times 1 - p, a temperature or
    top-p raises the sampler's by little where it is sure, so neither does this. Stale weights, other inputs, a cache
    of other weights, or float32 weights that move below the engine's bf16 do. A warning from three tokens at different
    positions or of different prompts. Log-probs of exactly 0 are left to `logprob-placeholder`.

    Rows apart: half or more of the tokens of a row of the newest version, four at least, are more than 0.1 nats apart,
    of those that a model was unsure of. A warning where in the other rows at most one such token in fifty is, and
    chance, if it chose tokens, would make rows of them once in a million runs: kernels, stale weights and experts that
    are routed otherwise do not choose rows. Log-probs of other tokens, of another row, or of inputs that differ do.

    ## What to do
    Find the cause first: the rules `temperature-mismatch`, `truncated-support`, `quantized-logprobs`,
    `logprob-placeholder` and `logprob-shift`. For what is left choose a correction whose effective sample size you can
    live with.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO001", toy_batch([[1, 0]], policy=-1.0, rollout=-1.02), trainer=None)
    'RDO001 info confirmed: mean_delta 0.02'
    >>> diagnose_one("RDO001", toy_batch([[1, 0]], policy=-3.0, rollout=-0.1), trainer=None)
    'RDO001 warning exposed: mean_delta -2.9'
    """

    code = "RDO001"
    name = "sampler-mismatch"
    references = (
        "https://github.com/volcengine/verl/pull/2953",
        "https://github.com/huggingface/trl/issues/6789",
        "https://github.com/allenai/open-instruct/issues/1473",
    )
    tally = MismatchTally
    needs_objective = False
    splits = ("train",)

    least_places: int = 3
    """One token may be a broken row; three at different places are the engine."""

    row_bits: float = 20.0
    """That rows are apart by chance has a probability below 2^-20."""

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs."""
        return frozenset({"rollout_log_probs", "old_log_probs"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, version stamps, and what tells prompts apart."""
        return frozenset({"response_mask", "policy_version_min", "policy_version_max"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sample the rows, and find the largest difference and the tokens that the sampler alone was sure of."""
        from rolloutdoctor.evaluation.sampled_rows import gap_of

        gap = gap_of(block)
        if gap is None:
            return {}
        return {
            **gap.sampled,
            "count": gap.count_N,
            "largest": gap.largest_n,
            "confident": _confident(block, gap),
        }

    def measure_each(self, steps: "StepView") -> list[MismatchTally]:
        """Add up the rows of each step."""
        import numpy as np

        sample, by_step = steps.sample(self.code), steps.by_step
        if sample is None:
            return steps.nothing(MismatchTally)
        row, lag_N = steps.token_measures[self.code], steps.lags(LAGS)
        tokens, high, place_N = by_step.count(row["count"]), by_step.high(row["largest"]), row["confident"]
        # A row of older weights may disagree with the present ones about anything.
        fresh_N = place_N if lag_N is None else place_N.where((lag_N == 0)[:, None], -1)
        return steps.tallies(
            MismatchTally,
            tokens=tokens,
            equal=np.where(high == 0, tokens, 0),
            confident=by_step.count((fresh_N >= 0).sum(1)),
            places=_places(steps, fresh_N),
            largest=np.where(tokens > 0, high, 0.0),
            **_of_sample(sample, None if lag_N is None else lag_N.cpu().numpy()),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows with most of the tokens that the sampler alone was sure of."""
        row = step.token_measures.get(self.code)
        if not row or not len(step.batch):
            return ()
        place_N = row["confident"]

        def note(number_of: int) -> str:
            first = int(place_N[number_of][0])
            start = int(step.batch.rows[number_of]) + first
            sampler, trainer = (
                float(step.batch.tokens_of(name, slice(start, start + 1))[0])
                for name in ("rollout_log_probs", "old_log_probs")
            )
            return f"log-prob {sampler:.3g} from the sampler and {trainer:.3g} from the trainer at token {first}"

        return step.worst_rows((place_N >= 0).sum(1).double(), note, KEEP_EXAMPLES)

    def measures(self, tally: MismatchTally) -> Mapping[str, Measure]:
        """The distribution of delta, and what weights would do."""
        return tally.measures

    def inconclusive_reason(self, run: MismatchTally, context: Context) -> Missing | None:
        """Nothing to compare."""
        if run.tokens:
            return None
        return Missing("no trained token has a log-prob of both", "record the sampler's log-probs for trained tokens")

    def vacuous_reason(self, run: MismatchTally, context: Context) -> str | None:
        """Old log-probs may be the sampler's own."""
        same = run.tokens and run.equal == run.tokens
        return (
            "the old log-probs are the sampler's, bit by bit, so that they say nothing of the trainer" if same else None
        )

    def judge(self, run: MismatchTally, context: Context) -> Judgement | None:
        """Information, and a warning where the sampler alone was sure."""
        if not run.tokens or run.equal == run.tokens:
            return None
        found = {name: measure.value for name, measure in self.measures(run).items()}
        of_lag = {
            lag: ratio(run.lag_size.get(lag, 0.0), tokens)
            for lag, tokens in sorted(run.lag.items(), key=lambda one: int(one[0]))
        }
        message = (
            f"delta has mean {number(found['mean_delta'])}, mean size {number(found['mean_abs_delta'])} and 99th "
            f"percentile about {number(found['p99_abs_delta'])}; {percent(found['off_by_tenth_share'])} of the tokens "
            f"have a ratio that is off by more than a tenth; effective sample size {percent(found['ess_share'])}"
        )
        if len(of_lag) > 1:
            message += "; mean size by version lag: "
            message += ", ".join(f"{number(mean)} at {lag}" for lag, mean in of_lag.items())
        is_sure = len(run.places) >= self.least_places
        rows_apart = run.has_rows_apart(self.row_bits)
        if rows_apart and not is_sure:
            rows, others = counted(run.apart, "sampled row"), ratio(run.beside_far, run.beside_tokens)
            headline = f"sampler and trainer are far apart in {rows} of {run.apart + run.beside:,}, and agree elsewhere"
            advice = (
                "compare what both were given in these rows: log-probs of another row or of other tokens, padding that "
                "is attended, or weights of another version"
            )
            message = (
                f"in {rows} half or more of the tokens are more than {FAR:g} nats apart, and {percent(others)} "
                f"of those of the others; {message}"
            )
        elif not is_sure:
            headline = (
                f"sampler and trainer differ by {number(found['mean_abs_delta'])} nats on average, effective sample "
                "size "
                f"{percent(found['ess_share'])}"
            )
            advice = (
                "a gap alone is not a fault: the other RDO rules look for its causes, and the measures show what caps "
                "on importance weights would keep and cut"
            )
        else:
            headline = f"the sampler was sure of {counted(run.confident, 'token')} that the trainer finds unlikely"
            advice = (
                "compare weights and inputs of both at the tokens listed: a sync that failed, a prefix cache that "
                "outlived it, another template, or float32 weights against an engine in bf16"
            )
            many = " or more" if len(run.places) >= OFTEN_KEPT else ""
            message = (
                f"the sampler gave {counted(run.confident, 'token')} at {len(run.places)}{many} places at least one "
                f"half, and the trainer gives them e^-2 of that or less; {message}"
            )
        places = [
            f"{number(ratio(run.at_size.get(each, 0.0), tokens))} from {PLACES[int(each)]}"
            for each, tokens in sorted(run.at.items())
        ]
        return Judgement(
            severity=Severity.WARNING if is_sure or rows_apart else Severity.INFO,
            confirmed=not is_sure and not rows_apart,
            headline=headline,
            message=message,
            evidence=(
                f"mean size by position: {', '.join(places)}; weights of tokens cut at 2 keep "
                f"{percent(found['cap_2_mass_share'])} of their sum, a mask of 0.5 to 5 keeps "
                f"{percent(found['mask_tokens_share'])} of the tokens, weights of rows are above 3 in "
                f"{percent(found['sequence_cap_3_rows_share'])} of the rows"
            ),
            advice=advice,
            measures={f"mean_abs_delta_lag_{lag}": Measure(mean, "nats") for lag, mean in of_lag.items()},
        )


def _confident(block: "TokenBlock", gap: "LoggedGap") -> "Tensor":
    """Positions of the first tokens of each row that the sampler alone is sure of, ``[n, 4]`` int64; -1: no more."""
    import torch

    found_N = torch.full((len(block.runs), 4), -1, dtype=torch.int64, device=block.runs.offsets.device)
    if gap.low > -APART:
        return found_N
    sampler_T = block.column("rollout_log_probs")
    places = ((gap.apart_T <= -APART) & (sampler_T >= SURE) & (sampler_T < 0)).nonzero().squeeze(1)
    row = torch.searchsorted(block.runs.offsets, places, right=True) - 1
    number_of = torch.arange(len(places), device=places.device) - torch.searchsorted(row, row)
    few = number_of < found_N.shape[1]
    found_N[row[few], number_of[few]] = places[few] - block.runs.offsets[row[few]]
    return found_N


def _places(steps: "StepView", place_N: "Tensor") -> list[dict[str, float]]:
    """Names of the prompts and positions of some tokens, of each step."""
    from rolloutdoctor.ops.prefix_hash import scramble

    found: list[dict[str, float]] = [{} for _ in steps.each]
    row, column = (place_N >= 0).nonzero(as_tuple=True)
    if not len(row):
        return found
    batch = steps.batch
    # Without the prompts themselves, those of two steps count as two.
    prompt_N = scramble(
        (steps.batch.row_N if batch.groups is None else steps.batch.group_N) + (steps.batch.number_N << 32)
    )
    if batch.prompts is not None:
        prompt_N = prompt_N.where(batch.prompts == 0, batch.prompts)
    keys = scramble(prompt_N[row] + place_N[row, column]).tolist()
    for step, key in zip(steps.by_step.step_N[row].tolist(), keys, strict=True):
        name = f"{key & (2**64 - 1):016x}"
        found[step][name] = found[step].get(name, 0.0) + 1
    return [{name: names[name] for name in sorted(names)[:OFTEN_KEPT]} for names in found]


def _of_sample(sample: "Sample", lag_N: "NDArray[np.int64] | None") -> dict[str, Any]:
    """Distribution and weights of the sampled rows of each step."""
    import numpy as np

    from rolloutdoctor.evaluation.sampler_gap import UNSURE
    from rolloutdoctor.ops.by_step import named_counts
    from rolloutdoctor.ops.gap_bins import BINS, bins_of

    gap, weight, tokens = sample.apart, sample.weight, sample.tokens_by_step
    size, cut = sample.size, np.minimum(weight, TOKEN_CAP)
    is_within = (weight >= TOKEN_BAND[0]) & (weight <= TOKEN_BAND[1])
    within, inside = (weight, tokens) if is_within.all() else (weight[is_within], tokens.only(is_within))
    here = sample.length > 0
    rows, total = sample.by_step.only(here), sample.by_row(gap)[here]
    mean, row_weight = np.exp(total / sample.length[here]), np.exp(np.minimum(total, log(ROW_CAP)))
    of_lag: dict[str, Any] = {}
    if lag_N is not None:
        lag = lag_N[sample.row]
        each = {"lag": sample.length, "lag_size": sample.by_row(size), "lag_k3": sample.by_row(weight - 1 - gap)}
        of_lag = {name: named_counts(sample.by_step.histogram(lag, LAGS, x)) for name, x in each.items()}
    is_unsure = (sample.sampler + sample.trainer < 2 * UNSURE) & (sample.sampler != 0)
    unsure, far = sample.by_row(is_unsure), sample.by_row(is_unsure & (size > FAR))
    is_known = unsure >= 4 if lag_N is None else (unsure >= 4) & (lag_N[sample.row] == 0)
    is_apart = 2 * far >= unsure
    apart, beside = sample.by_step.only(is_known & is_apart), sample.by_step.only(is_known & ~is_apart)
    return {
        "apart": apart.size,
        "apart_tokens": apart.count(unsure[is_known & is_apart]),
        "beside": beside.size,
        "beside_tokens": beside.count(unsure[is_known & ~is_apart]),
        "beside_far": beside.count(far[is_known & ~is_apart]),
        "rows": rows.size,
        "row_weight": rows.sum(row_weight),
        "row_square": rows.sum(np.square(row_weight)),
        "rows_over": rows.count(total > log(ROW_CAP)),
        "rows_near": rows.count((mean >= ROW_BAND[0]) & (mean <= ROW_BAND[1])),
        "seen": tokens.size,
        "sizes": named_counts(tokens.histogram(bins_of(size), BINS)),
        "off": tokens.count(abs(weight - 1) > 0.1),
        "weight": tokens.sum(weight),
        "square": tokens.sum(np.square(weight)),
        "cut_weight": tokens.sum(cut),
        "cut_square": tokens.sum(np.square(cut)),
        "inside": inside.size,
        "inside_weight": inside.sum(within),
        "inside_square": inside.sum(np.square(within)),
        "at": named_counts(sample.by_place(None, PLACES)),
        "at_size": named_counts(sample.by_place(size, PLACES)),
        "at_gap": named_counts(sample.by_place(gap, PLACES)),
        **of_lag,
    }
