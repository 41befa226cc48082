"""RDI009: responses that occur again, more often than sampling explains."""

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import prompt_columns, response_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.copy_chance import binned, copy_chance, nats_beyond_chance, pairs_of
from rolloutdoctor.rules.measures.shared_prefixes import BEYOND, LENGTHS, is_first, shared_prefixes
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, of_smallest, with_sums

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

SAMPLER = ("rollout_log_probs", "old_log_probs", "policy_log_probs")
"""Log-probs that say how likely a response was, best first."""

PREFIXES = 64
"""Prefixes of a run that are compared across steps."""

SAMPLE = 256
"""Responses of a run that are compared across steps."""

FOLLOWED = 128
"""Those of the prefixes that are compared across steps."""

GROUP = (*STEP_KEY, "group")
RESPONSE = (*STEP_KEY, "generation_id", "response")
"""Rows with one response; those of another pass over a generated batch are no copies."""

KIND = (*RESPONSE, "group")


class DuplicateResponses(TableRule):
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
    trainer's) over trained tokens, so masked tool output does not count. Copies whose sum is below -30, minus the
    logarithm of the number of compared pairs, have a chance below 1e-13 in the whole run. So have several copies of
    likelier responses, down to half as many nats, if their number has (Chernoff's bound, at no more than that chance
    for each pair). If every response is likelier than these, the rule is skipped. If every group has a single response,
    temperature 0 looks the same, and the finding is a warning; if groups have several, sampling was on, and it is an
    error. Copies with larger chances are information from a quarter of the rows. Across steps 256 responses, chosen by
    hash, are followed; one that recurs with other `rollout_log_probs`, beyond chance, was sampled again: a warning.
    With the same ones it is the same sample, trained on again (a replay buffer, or several updates for one generation),
    and information. Prefixes of 32, 64 and so on up to 2,048 tokens are compared, too: two different responses to one
    prompt do not share a prefix by chance if its trained tokens have 50 nats or more (1e-13 for 10^8 pairs). Engines
    with one seed diverge where their rounding differs; so does temperature 0, and a sampler that branches responses on
    purpose looks the same: a warning. A collapsed policy, and short or certain beginnings, have fewer nats; a beginning
    that groups of different prompts share was forced (`RDI006`). Of the prefixes of 128 tokens 64 are followed across
    steps; with the same log-probs they are one sample.

    `copies_expected` is what independent draws with the probabilities of these responses would give.
    `effective_group_size` counts the different responses of a group; `reward_variance_lost` is the share of the
    within-group variance of independent draws that copies take away.

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
    reads = ("tokens", "prompt", "rank", "generation_id")
    adds = (
        *("response", "seed", "key", "prefix_key", "log_prob", "told"),
        *(f"{name}_{length}" for name in ("prefix", "nats") for length in LENGTHS),
    )
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
        """Return the log-probs and token columns of the responses, and those that identify prompts in other steps."""
        named = {self._log_probs(context.columns), "response_mask", "rank", "generation_id"}
        return frozenset(named) | prompt_columns(context.columns)

    def _log_probs(self, columns: frozenset[str]) -> str:
        return next((name for name in SAMPLER if name in columns), SAMPLER[0])

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Hash each response and its prefixes, and add up their log-probs."""
        from rolloutdoctor.rules.measures.response_hashes import response_hashes

        return response_hashes(block, next((name for name in SAMPLER if block.is_logged(name)), None), FOLLOWED)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each response that recurs in its step, sums over the others, and the sample that is followed.

        They have ids or a text, and a token unless no row of the step has any. `is_copy` repeats a response of its
        group, `is_across` is the first of its group that repeats one of another; `prefixed` and `prefixed_across` are
        the same of prefixes.
        """
        has_tokens, nats = pl.col("tokens") > 0, pl.col("nats")
        size, copies = pl.col("size"), pl.col("copies")
        rows = (
            rows.filter(pl.col("response") != 0, has_tokens | ~has_tokens.any().over(STEP_KEY))
            .with_columns(
                told=(pl.col("told") > 0).fill_null(value=False),
                nats=(-pl.col("log_prob")).clip(lower_bound=0).fill_null(0.0),
                size=pl.len().over(GROUP).cast(pl.Float64),
                copies=pl.len().over(KIND),
                is_copy=~is_first(KIND),
                is_across=is_first(KIND) & ~is_first(RESPONSE),
                in_groups=pl.n_unique("group").over(RESPONSE),
            )
            .with_columns(is_kept=(copies > 1) | (pl.col("in_groups") > 1))
            .with_columns(
                is_group=is_first(GROUP) & (size > 1),
                pairs=pl.when(is_first(GROUP)).then(pairs_of(size)),
                all_pairs=pl.when(is_first(STEP_KEY)).then(pairs_of(pl.len().over(STEP_KEY))),
                alike=(copies == size).all().over(GROUP),
                lost=1 - (1 - copies.sum().over(GROUP) / size**2) / (1 - 1 / size),
                chance=pl.when("told").then(copy_chance((-nats).exp(), size)).otherwise(0.0),
                unlikely=pl.when("is_kept").then(nats).otherwise(0.0),
                copy_nats=binned(nats.min().over(KIND)),
                across_nats=binned(nats.min().over(RESPONSE)),
            )
        )
        lines = rows.join(shared_prefixes(rows), on=(*STEP_KEY, "row"), how="left", maintain_order="left").with_columns(
            full=(size > 1).cast(pl.Int64),
            groups=pl.col("is_group").cast(pl.Int64),
            groups_alike=(pl.col("is_group") & pl.col("alike")).cast(pl.Int64),
            lost=pl.when("is_group").then("lost"),
            told_rows=pl.col("told").cast(pl.Int64),
        )
        sums = ("full", "groups", "groups_alike", "lost", "chance", "told_rows", "pairs", "all_pairs")
        hashes = [f"{name}_{length}" for name in ("prefix", "nats") for length in LENGTHS]
        is_kept = pl.col("is_kept") | (pl.col("shared_nats") > 0).fill_null(value=False)
        frame = with_sums(lines.drop("seed", "status", "alike", "told", *hashes), is_kept, *sums, nats=pl.max("nats"))
        return pl.concat([frame, *_followed(lines)], how="diagonal").sort(STEP_KEY, maintain_order=True)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The responses and sums; copies are impossible where chance is out.

        Lines of their own are `resampled`, `replayed` and `prefix_again`: what recurs in another step, at its last one.
        """
        rows, times = run.rows.filter(pl.col("sample").is_null() & pl.col("beginning").is_null()), pl.col("values")
        inside, across = rows.filter("is_copy")["copy_nats"], rows.filter("is_across")["across_nats"]
        pairs, all_pairs = rows.select(pl.sum("pairs", "all_pairs")).row(0)
        least = self._least(rows)
        again = _again(run.rows.drop_nulls("sample"), "sample", SAMPLE).filter(pl.col("nats") > least)
        begins = _again(run.rows.drop_nulls("beginning"), "beginning", PREFIXES)
        lines = rows.with_columns(
            impossible=pl.col("is_copy") & (pl.col("copy_nats") >= nats_beyond_chance(inside, pairs, least)),
            impossible_across=pl.col("is_across")
            & (pl.col("across_nats") >= nats_beyond_chance(across, all_pairs, least)),
        )
        repeated = again.select(*STEP_KEY, resampled=times > 1, replayed=times == 1)
        return pl.concat([lines, repeated, begins.select(*STEP_KEY, prefix_again=times > 1)], how="diagonal")

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of copies, and what they cost."""
        full, groups, copies = pl.sum("full"), pl.sum("groups"), pl.sum("is_copy")
        is_told = pl.sum("told_rows") > 0
        return {
            "impossible_copies": (pl.sum("impossible"), "rows"),
            "impossible_copies_in_other_groups": (pl.sum("impossible_across"), "rows"),
            "copies": (copies, "rows"),
            "copies_share": (copies / full, "share"),
            "copies_expected": (pl.when(is_told).then(pl.sum("chance")), "rows"),
            "effective_group_size": ((full - copies) / groups, "rows"),
            "group_size": (full / groups, "rows"),
            "reward_variance_lost": (pl.sum("lost") / groups, "share"),
            "groups_alike": (pl.sum("groups_alike"), "groups"),
            "impossible_prefixes": (pl.when(is_told).then(pl.sum("prefixed")), "rows"),
            "impossible_prefixes_in_other_groups": (pl.when(is_told).then(pl.sum("prefixed_across")), "rows"),
            "longest_prefix": (pl.max("longest"), "tokens"),
            "resampled_prefixes": (pl.sum("prefix_again"), "prefixes"),
            "resampled_responses": (pl.sum("resampled"), "responses"),
            "replayed_responses": (pl.sum("replayed"), "responses"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Copies of the least likely responses, each with the name of another one, of its group if there is one."""
        return table.filter(pl.col("is_kept") | (pl.col("shared_nats") > 0)).with_columns(
            value=pl.max_horizontal("unlikely", "shared_nats"),
            twin=pl.when(pl.col("copies") > 1).then(_other(KIND)).otherwise(_other(RESPONSE)),
        )

    def note(self, place: Mapping[str, Any]) -> str:
        """Name what the response repeats."""
        if not place["unlikely"]:
            return "begins like another response to its prompt"
        return f"the same response as {place['twin']}"

    def _least(self, lines: pl.DataFrame) -> float:
        """Nats beyond which no copy is chance, however many pairs were compared."""
        return self.nats + log(max(lines["all_pairs"].sum(), 1.0))

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Nothing to compare, or copies of which nothing says how likely they were."""
        share, copied = run["copies_share"], run.count("copies")
        if share is None:
            return Missing("no group has two responses with tokens", "widen --steps, or record whole groups")
        if not copied or run.table["told_rows"].sum() or share >= self.info_above:
            return None
        return Missing(
            f"{counted(copied, 'row')} repeat a response of their group, and without log-probs its probability is "
            "unknown",
            context.to_record(SAMPLER[0]),
        )

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Responses so likely that copies of them would be chance."""
        half = self._least(run.table) / 2
        if not run.table["told_rows"].sum() or run.table["nats"].ge(half).any():
            return None
        return Missing(
            f"every response is likelier than exp(-{half:.0f}): copies of them may be chance",
            "look at a run with longer responses; the seeds of the requests are in the engine's log",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where chance is out, a warning where temperature 0 is not, information otherwise."""
        least = self._least(run.table)
        resampled, replayed = run.count("resampled_responses"), run.count("replayed_responses")
        # The trainer's log-probs of one sample change with its weights; the sampler's stay.
        prefixes = run.count("resampled_prefixes") if SAMPLER[0] in context.columns else 0
        if run["impossible_copies"] or run["impossible_copies_in_other_groups"]:
            return self._impossible(run, least)
        if resampled and SAMPLER[0] in context.columns:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=f"{counted(resampled, 'response')} of {SAMPLE} recur in later steps, more often than "
                "sampling explains",
                message="the sampler returned the same response to the same prompt in several steps, token for token",
                evidence=f"the log-probs differ, so it was sampled again; chance of a copy below exp(-{least:.0f})",
                advice="look for a seed that is reset at every step, or a response cache in the engine",
            )
        if run["impossible_prefixes"] or run["impossible_prefixes_in_other_groups"] or prefixes:
            return self._prefixes(run, prefixes)
        if (run["copies_share"] or 0.0) >= self.info_above:
            expected, advice = "", "record rollout_log_probs"
            evidence = "without log-probs this may be chance, temperature 0 or a repeated seed"
            if run.table["told_rows"].sum():
                expected = f"; independent draws would give {number(run['copies_expected'])}"
                advice = "raise the temperature or the entropy bonus, or drop prompts with only one answer"
                evidence = "each is likely enough to be sampled twice: short answers, or a collapsed policy"
            alike = f"{counted(run.count('groups_alike'), 'group')} of {run.table['groups'].sum():,.0f}"
            return Judgement(
                severity=Severity.INFO,
                confirmed=True,
                headline=f"{percent(run['copies_share'])} of the responses repeat another in their group: "
                f"{_sizes(run)}",
                message=f"{counted(run.count('copies'), 'row')} repeat a response of their group{expected}; {alike} "
                "have a single response",
                evidence=evidence,
                advice=advice,
            )
        if replayed or resampled:
            return Judgement(
                severity=Severity.INFO,
                confirmed=True,
                headline=f"{counted(replayed + resampled, 'response')} of {SAMPLE} were trained in several steps",
                message="several steps contain the same responses to the same prompts",
                evidence="equal tokens and log-probs: a replay buffer, or several updates for one generation"
                if not resampled
                else "equal tokens; only the sampler's log-probs would separate a replay buffer from a repeated seed",
                advice="keep it if the trainer reuses rollouts on purpose",
            )
        return None

    def _prefixes(self, run: Measured, again: int) -> Judgement:
        prefixed, across = run.count("impossible_prefixes"), run.count("impossible_prefixes_in_other_groups")
        where = [f"{counted(prefixed, 'row')} begin like another response of their group"] if prefixed else []
        where += [f"{counted(across, 'row')} like one of another group of their prompt"] if across else []
        where += [f"{counted(again, 'beginning')} of {PREFIXES} recur in another step"] if again else []
        length = f", up to {run['longest_prefix']:,.0f} tokens or more" if run["longest_prefix"] else ""
        groups = run.table.filter("prefixed").select(pl.struct(GROUP).n_unique()).item()
        alike = groups == run.table["groups"].sum()
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"{' and '.join(where)}{length}, which is not chance",
            message=f"{', '.join(where)}{length}, then continue differently: "
            f"{'temperature 0 with kernel noise, or ' if alike else ''}requests share a seed and diverge where the "
            "engine's rounding differs, or start from a cached response",
            evidence=f"the chance of each prefix is below exp(-{BEYOND:.0f}); prefixes that groups of different "
            "prompts share do not count",
            advice="give every request its own seed (per rank and step), or none; no action if the sampler branches "
            "responses on purpose",
        )

    def _impossible(self, run: Measured, least: float) -> Judgement:
        inside, across = run.count("impossible_copies"), run.count("impossible_copies_in_other_groups")
        by_rank = run.table.drop_nulls("rank").group_by(RESPONSE).agg(pl.n_unique("rank"))["rank"]
        other_ranks = int(by_rank.sum()) - len(by_rank)
        alike = inside > 0 and run["groups_alike"] == run.table["groups"].sum()
        ranks = f", {other_ranks:,} of them on another rank" if other_ranks else ""
        where = [f"{counted(inside, 'row')} repeat a response of their group"] if inside else []
        where += [f"{counted(across, 'response')} recur in another group of the step{ranks}"] if across else []
        cause = "every request of a group has the same seed" if inside else "groups share a seed, or rows were mixed up"
        if across and other_ranks:
            cause = "ranks sample with the same seed"
        return Judgement(
            severity=Severity.WARNING if alike else Severity.ERROR,
            confirmed=not alike,
            headline=f"{' and '.join(where)}, which is not chance: {_sizes(run)}",
            message=f"{', '.join(where)}, token for token; {'temperature 0, or ' if alike else ''}{cause}, or the "
            "engine served cached responses",
            evidence=f"the chance of each copy, or of so many, is below exp(-{least:.0f}), the union bound over "
            f"{run.table['all_pairs'].sum():,.0f} pairs included"
            + ("; every group has a single response, as at temperature 0" if alike else ""),
            advice="give every request its own seed (per rank), or none",
        )


def _sizes(run: Measured) -> str:
    sizes = number(run["effective_group_size"]), number(run["group_size"])
    return f"{sizes[0]} different responses per group of {sizes[1]}"


def _other(keys: tuple[str, ...]) -> pl.Expr:
    """Name of the first other row with the same keys."""
    name = pl.col("sample_id")
    second = name.slice(1, 1).first().over(keys)
    return pl.when(is_first(keys)).then(second).otherwise(name.first().over(keys))


def _followed(lines: pl.DataFrame) -> list[pl.DataFrame]:
    """Responses and beginnings that may be among those which are followed across steps, and their nats."""
    is_known, nats = pl.col("prompt") != 0, pl.col(f"nats_{FOLLOWED}")
    sampled = lines.filter(is_known & (pl.col("key") != 0) & pl.col("told"))
    begun = lines.filter(is_known & (pl.col("tokens") > FOLLOWED) & (nats >= BEYOND))
    return [
        of_smallest(key, keep, rows).select(*STEP_KEY, "row", nats=nats, **{name: key})
        for name, key, keep, rows, nats in (
            ("sample", "key", SAMPLE, sampled, pl.col("nats")),
            ("beginning", "prefix_key", PREFIXES, begun, nats),
        )
    ]


def _again(rows: pl.DataFrame, key: str, keep: int) -> pl.DataFrame:
    """Of hashes that come in several steps the last row, its least `nats`, and how many different `values` they have.

    Of copies in a step the likeliest counts: with the same log-probs in every step they are one sample.
    """
    return (
        of_smallest(key, keep, rows)
        .filter(pl.n_unique("step").over(key) > 1)
        .with_columns(nats=pl.col("nats").min().over(key, *STEP_KEY))
        .group_by(key, maintain_order=True)
        .agg(pl.last(*STEP_KEY, "row"), pl.min("nats"), values=pl.n_unique("nats"))
    )
