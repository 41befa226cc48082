"""RDO001: how far the sampler's log-probs are from the trainer's, and what importance weights make of it."""

from collections.abc import Mapping, Sequence
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.context_end import ADDS, AtEnd, at_context_end, ends_in, ends_of, only_ends
from rolloutdoctor.rules.measures.named_values import by_key, count, of, quantile, total, totals
from rolloutdoctor.rules.measures.weight_sums import FAR, LAGS, OFTEN_KEPT, confident_places, place_keys, sums_of
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

MOST_FAR = 0.02
"""Share of such tokens in the other rows above which all rows are off, and none of them is apart."""


class SamplerMismatch(TableRule):
    """The sampler's log-probs differ from the trainer's.

    ## What it does
    Describes delta, the trainer's log-prob before the update minus the sampler's, on trained tokens, and what
    importance weights exp(delta) at the usual caps would keep. Warns only of tokens that the sampler was sure of and
    the trainer was not, of rows that are far apart where the others agree, and of a larger gap at the end of the
    context.

    ## Why it matters
    Kernels, precision and parallelism differ between an inference engine and a trainer, so training is never exactly
    on-policy. Means hide it: upstream, a mean of -0.0015 went with 7.5 % of the tokens outside 0.9 to 1.1. How much is
    too much depends on model and stack, so no level is a fault; a cause is, and other rules look for causes.

    ## How it is measured
    Means, shares and weights are of sampled rows, about 2^13 tokens a step; `tokens` counts all. `p99_abs` is the
    centre of a bin a quarter of a doubling wide. `ess_share` = (sum w)^2 / (n sum w^2) is the effective sample size as
    a share of the tokens; `k3` = mean of exp(delta) - 1 - delta, the KL of sampler and trainer. For token weights
    truncated at 2 and for a token mask of 0.5 to 5, `..._mass_share` is what is left of the sum of weights,
    `..._ess_share` the effective sample size, and `..._kappa` = sum w / sum w^2 how much larger the update without
    weights is than the one with them, if advantages are independent of w. Weights of rows are products over tokens,
    truncated at 3; the geometric mask keeps those with a geometric mean of 0.999 to 1.001. Version lag is how many
    versions the oldest part of a row is behind the newest of its step.

    Confident disagreement: the sampler gave the token at least one half and the trainer at most e^-2 of that, in a row
    of the newest version of its step. Kernel noise (its size times 1 - p), temperature and top-p move a log-prob little
    where the sampler is sure. Stale weights, other inputs, a cache from other weights, or float32 updates too small for
    the engine's bf16 do. It is a warning from three tokens at different positions or of different prompts; of a row the
    first four count. Log-probs of exactly 0 are left to `logprob-placeholder`.

    Rows apart: of the tokens to which both models gave less than 0.9 in the geometric mean, at least four, half or more
    in a row of the newest version are more than 0.1 nats apart. It is a warning if these are at most half of the rows,
    in the others at most one such token in fifty is, and chance would fill half of a row with these once in a million
    runs: kernels, stale weights and routed experts single out no rows. Log-probs of other tokens or inputs do.

    End of the context: in responses that end at the longest sequence of the run, or up to seven tokens before it, the
    last eight tokens are five times as far apart as the 32 before them and as the last tokens of other responses, and
    at least 0.1 nats. It is a warning if chance would give so many of these responses a larger gap at the end in one
    run of 30,000 (four standard deviations, 16 responses), unless all are as long as the longest of the others: then
    the response is capped. Upstream, draft tokens of speculative decoding that did not fit made such log-probs very
    wrong.

    ## What to do
    Find the cause first: the rules `temperature-mismatch`, `truncated-support`, `quantized-logprobs`,
    `logprob-placeholder` and `logprob-shift`. For what is left, choose a correction whose effective sample size you can
    accept.

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
        "https://github.com/vllm-project/vllm/pull/38711",
    )
    reads = ("tokens",)
    adds = ("confident", "token", "rollout_log_probs", "old_log_probs", *ADDS)
    needs_objective = False
    splits = ("train",)
    needs = ("rollout_log_probs", "old_log_probs")
    uses = ("response_mask", "policy_version_min", "policy_version_max", "prompt_ids")

    least_places: int = 3
    """One token may be a broken row; three at different places are the engine."""

    row_bits: float = 20.0
    """That rows are apart by chance has a probability below 2^-20."""

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Find the largest difference and the tokens that the sampler alone was sure of."""
        from rolloutdoctor.rules.measures.sampled_rows import gap_of

        gap = gap_of(block)
        if gap is None:
            return {}
        largest = {"count": gap.count_N, "largest": gap.largest_n}
        return {**largest, "places": confident_places(block, gap), **ends_of(block)}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Count the tokens of each row that the sampler alone was sure of, and look at the first."""
        import torch

        from rolloutdoctor.data.schema import PROMPT_LENGTH

        measured, prompt_N = step.token_measures[self.code], step.batch.per_row.get(PROMPT_LENGTH)
        place_N = measured["places"].cpu()
        columns: dict[str, Tensor | None] = {name: measured[name] for name in ("end", "before")}
        columns |= {"confident": (place_N >= 0).sum(1), "token": place_N[:, 0]}
        columns["context"] = None if prompt_N is None else (prompt_N + step.batch.rows.diff()).where(prompt_N >= 0, -1)
        for name in ("rollout_log_probs", "old_log_probs"):
            columns[name] = first_N = torch.full((len(place_N),), torch.nan, dtype=torch.float64)
            for row in (place_N[:, 0] >= 0).nonzero().squeeze(1).tolist():
                start = int(step.batch.rows[row] + place_N[row, 0])
                first_N[row] = float(step.batch.tokens_of(name, slice(start, start + 1))[0])
        return columns

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Add up the rows of each step."""
        import numpy as np

        sample, by_step = steps.sample(), steps.by_step
        if sample is None:
            return steps.nothing(dict)
        row, lag_N = steps.token_measures[self.code], steps.lags(len(LAGS))
        tokens, high, place_N = by_step.count(row["count"]), by_step.high(row["largest"]), row["places"]
        # A row of older weights may disagree with the present ones about anything.
        fresh_N = place_N if lag_N is None else place_N.where((lag_N == 0)[:, None], -1)
        sums = steps.values(
            tokens=tokens,
            equal=np.where(high == 0, tokens, 0),
            confident=by_step.count((fresh_N >= 0).sum(1)),
            largest=np.where(tokens > 0, high, 0.0),
            **sums_of(sample, None if lag_N is None else lag_N.cpu().numpy()),
        )
        return [of_step | places for of_step, places in zip(sums, place_keys(steps, fresh_N), strict=True)]

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the rows with a confident disagreement, and what tells of the end of the context."""
        return pl.concat([rows.filter(pl.col("confident") > 0), ends_in(rows)], how="diagonal_relaxed")

    def thinned(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Count responses that end before the context does."""
        return pl.concat([lines.filter(pl.col("alike").is_null()), only_ends(lines.drop_nulls("alike"))])

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each value of a step, and for each row with a confident disagreement."""
        return pl.concat([run.added_up(largest=["largest"]), run.rows], how="diagonal_relaxed")

    def quantities(self) -> Mapping[str, Quantity]:
        """The distribution of delta, and what weights would do."""
        compared, rows, weight = total("seen"), total("rows"), total("weight")

        def mean_at(*, is_early: bool) -> pl.Expr:
            sums = [of(name).filter((of(name, "key") < 16) == is_early).sum() for name in ("at_size", "at")]
            return sums[0] / sums[1]

        def ess(start: str, tokens: pl.Expr) -> pl.Expr:
            return total(f"{start}weight") ** 2 / (total(f"{start}square") * tokens)

        def kappa(start: str) -> pl.Expr:
            return total(f"{start}weight") / total(f"{start}square")

        return {
            "mean_delta": (total("gap") / compared, "nats"),
            "mean_abs_delta": (total("at_size") / compared, "nats"),
            "p99_abs_delta": (quantile("size", 0.99), "nats"),
            "max_abs_delta": (pl.when(total("tokens") > 0).then(of("largest").max().fill_null(0.0)), "nats"),
            "off_by_tenth_share": (total("off") / compared, "share"),
            "k3": ((weight - compared - total("gap")) / compared, "nats"),
            "ess_share": (ess("", compared), "share"),
            "rows_apart": (count("apart"), "rows"),
            "tokens": (count("tokens"), "tokens"),
            "sampled_tokens": (count("seen"), "tokens"),
            "mean_abs_delta_first_16": (mean_at(is_early=True), "nats"),
            "mean_abs_delta_later": (mean_at(is_early=False), "nats"),
            "cap_2_mass_share": (total("cut_weight") / weight, "share"),
            "cap_2_ess_share": (ess("cut_", compared), "share"),
            "cap_2_kappa": (kappa("cut_"), "1"),
            "mask_tokens_share": (total("inside") / compared, "share"),
            "mask_mass_share": (total("inside_weight") / weight, "share"),
            "mask_ess_share": (ess("inside_", compared), "share"),
            "mask_kappa": (kappa("inside_"), "1"),
            "sequence_cap_3_rows_share": (total("rows_over") / rows, "share"),
            "sequence_cap_3_ess_share": (ess("row_", rows), "share"),
            "sequence_cap_3_kappa": (kappa("row_"), "1"),
            "geometric_kept_rows_share": (total("rows_near") / rows, "share"),
            "confident_tokens": (count("confident"), "tokens"),
            "confident_places": (of("place", "key").n_unique().clip(upper_bound=OFTEN_KEPT).cast(pl.Int64), "places"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Rows with most of the tokens that the sampler alone was sure of."""
        return table.filter(pl.col("confident") > 0).with_columns(value="confident")

    def note(self, place: Mapping[str, Any]) -> str:
        """Both log-probs of the first."""
        return (
            f"log-prob {place['rollout_log_probs']:.3g} from the sampler and {place['old_log_probs']:.3g} from the "
            f"trainer at token {place['token']}"
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Nothing to compare."""
        if run["tokens"]:
            return None
        nothing = "no trained token has a log-prob from both sampler and trainer"
        return Missing(nothing, "record the sampler's log-probs for trained tokens")

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Old log-probs may be the sampler's own."""
        if not run["tokens"] or totals(run.table, "equal") != (run["tokens"],):
            return None
        return "the old log-probs are bit-identical to the sampler's, so they do not show the trainer's"

    def _has_rows_apart(self, run: Measured) -> bool:
        """True if some rows, half at most, are apart beyond chance, if it chose the far tokens, and the others agree.

        Of n tokens half are far with a probability below (4 p)^(n/2) if each is with p (Chernoff's bound).
        """
        names = "apart", "apart_tokens", "beside", "beside_tokens", "beside_far"
        apart, tokens, near, others, far = totals(run.table, *names)
        if not 0 < apart <= near or (share := (far + 1) / (others + 2)) > MOST_FAR:
            return False
        return tokens / 2 * log2(1 / (4 * share)) - apart * log2(apart + near) >= self.row_bits

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information, and a warning where the sampler alone was sure."""
        if not run["tokens"] or self.vacuous_reason(run, context):
            return None
        of_lag, at = (
            {key: by_key(run.table, f"{name}_size").get(key, 0.0) / tokens for key, tokens in counts.items()}
            for name, counts in ((name, by_key(run.table, name)) for name in ("lag", "at"))
        )
        places_at = ", ".join(f"{number(mean)} from {start:g}" for start, mean in at.items())
        places, ending = run.count("confident_places"), at_context_end(run.table.drop_nulls("alike"))
        faults = [_of_sure_tokens(run, places)] if places >= self.least_places else []
        faults += [_of_rows_apart(run)] if self._has_rows_apart(run) else []
        faults += [_of_context_end(ending)] if ending is not None else []
        words, at_end = faults[0] if faults else _of_means(run), dict[str, Measure]()
        sentences = [words.message, _distribution(run, of_lag)]
        if ending is not None:
            sentences.insert(0, f"{_told_of(ending)}, in {ending.above:,} of them")
            at_end = {"gap_context_end": Measure(ending.end, "nats")}
        return Judgement(
            severity=Severity.WARNING if faults else Severity.INFO,
            confirmed=not faults,
            headline=words.headline,
            message="; ".join(filter(None, sentences)),
            evidence=(
                f"mean absolute difference by position: {places_at}; token weights capped at 2 keep "
                f"{percent(run['cap_2_mass_share'])} of their sum, a mask of 0.5 to 5 keeps "
                f"{percent(run['mask_tokens_share'])} of the tokens, sequence weights exceed 3 in "
                f"{percent(run['sequence_cap_3_rows_share'])} of the rows"
            ),
            advice=words.advice,
            measures={f"mean_abs_delta_lag_{lag:g}": Measure(mean, "nats") for lag, mean in of_lag.items()} | at_end,
        )


class Words(NamedTuple):
    """What is said of one kind of mismatch; the message may be empty."""

    headline: str
    advice: str
    message: str = ""


def _distribution(run: Measured, of_lag: Mapping[float, float]) -> str:
    by_lag = ", ".join(f"{number(mean)} at {lag:g}" for lag, mean in of_lag.items())
    return (
        f"the log-ratio trainer - sampler has mean {number(run['mean_delta'])}, mean absolute value "
        f"{number(run['mean_abs_delta'])} and 99th percentile about {number(run['p99_abs_delta'])}; "
        f"{percent(run['off_by_tenth_share'])} of the tokens have a ratio off by more than 10 %; effective sample "
        f"size {percent(run['ess_share'])}"
    ) + (f"; mean absolute value by version lag: {by_lag}" if len(of_lag) > 1 else "")


def _of_sure_tokens(run: Measured, places: int) -> Words:
    tokens, many = counted(run.count("confident_tokens"), "token"), " or more" if places >= OFTEN_KEPT else ""
    return Words(
        f"the sampler gave {tokens} a high probability that the trainer finds unlikely",
        "compare weights and inputs of both engines at the tokens under `where`: a failed weight sync, a stale prefix "
        "cache, another chat template, or float32 weights against a bf16 engine",
        f"{tokens} at {places}{many} positions have a sampler probability of at least 0.5 and a trainer probability at "
        "most e^-2 of it",
    )


def _of_rows_apart(run: Measured) -> Words:
    near, far, others = totals(run.table, "beside", "beside_far", "beside_tokens")
    apart = run.count("rows_apart")
    rows = counted(apart, "sampled row")
    return Words(
        f"sampler and trainer log-probs disagree in {rows} of {apart + int(near):,} and agree in all others",
        "compare the inputs of both engines for these rows: log-probs of another row or of other tokens, attended "
        "padding, or weights of another version",
        f"in {rows} at least half of the tokens differ by more than {FAR:g} nats, elsewhere {percent(far / others)}",
    )


def _of_context_end(ending: AtEnd) -> Words:
    return Words(
        _told_of(ending),
        "look at what the engine does near its longest sequence, speculative decoding first: draft tokens that no "
        "longer fit; or raise max_model_len above the longest prompt and response",
    )


def _told_of(ending: AtEnd) -> str:
    return (
        f"the last tokens of {counted(ending.rows, 'response')} that reach the end of the context, "
        f"{ending.length:,} tokens, are {number(ending.end)} nats apart, and those before them "
        f"{number(ending.before)}"
    )


def _of_means(run: Measured) -> Words:
    return Words(
        f"train-inference mismatch of {number(run['mean_abs_delta'])} nats per token (mean), effective sample size "
        f"{percent(run['ess_share'])}",
        "look at the other RDO rules, which test its causes: a mismatch alone is not a fault; the measures show what "
        "caps of importance weights would cut",
    )
