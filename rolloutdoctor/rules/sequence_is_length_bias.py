"""RDO007: importance weights of sequences that depend on length."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, log
from typing import TYPE_CHECKING, NamedTuple

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, loss_columns
from rolloutdoctor.ops.bounds import share_bound
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Excluded, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.audit.tally import QuantityTally
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

THIRDS = ("shortest", "middle", "longest")


class _Bound(NamedTuple):
    """A bound on a sum over the tokens of a row.

    Attributes:
        of: what is summed: ``k1`` (delta), ``k2`` or ``k3``.
        low: smallest sum that is left alone.
        high: largest.
        rejects: rows beyond it are left out; else their weight is cut.
    """

    of: str
    low: float
    high: float
    rejects: bool


def _log(value: float | None, none: float) -> float:
    return none if value is None else log(value) if value > 0 else -inf


def _bounds(objective: Objective | None) -> list[_Bound]:
    """Bounds on sums over rows that the objective has."""
    if objective is None:
        return []
    around, inside, found = objective.correction, objective.sampler_correction, []
    if around.weights is not None and around.weighs and around.weights.level == "sequence":
        low, high = around.weights.low, around.weights.high
        found.append(_Bound("k1", _log(low, -inf), _log(high, inf), rejects=low is not None))
    for rejection in around.rejections if around.rejects else ():
        over, _, of = rejection.statistic.rpartition("_")
        if over == "seq_sum":
            low, high = -inf if rejection.low is None else rejection.low, rejection.high
            found.append(_Bound(of, *((-high, -low) if of == "k1" else (low, high)), rejects=True))
    if inside is not None and inside.weighs and inside.level == "sequence":
        found.append(_Bound("k1", _log(inside.low, -inf), _log(inside.high, inf), rejects=inside.mode == "mask"))
    if inside is not None and inside.reject_level == "sequence":
        found.append(_Bound("k1", _log(inside.reject_low, -inf), _log(inside.reject_high, inf), rejects=True))
    return found + [
        _Bound("k1", _log(gate.low, -inf), _log(gate.high, inf), rejects=gate.outside == "zero")
        for gate in objective.gates
        if gate.kind == "importance" and gate.level == "sequence" and gate.against == "rollout_log_probs"
    ]


@dataclass(frozen=True)
class LengthTally(Sums):
    """What `sequence-is-length-bias` adds up; thirds are those of the rows of each step by length.

    Attributes:
        rows: third to rows.
        tokens: third to trained tokens.
        kept: third to rows within all bounds.
        size: third to the sum of the absolute differences of tokens.
        weight: third to the sum of the weights, the product of their tokens', cut at e^20.
        trend: sum over the lost rows of their length, less the mean length of their step, in tokens.
        trend_variance: its variance if the lost rows were any rows of their step.
        ranked: rows whose length and weight were ranked within their step.
        correlation: sum over these of the rank correlation of length and absolute log weight in their step.
        logged: logged metrics of the weights.
        agree: those that follow from the rows and the options.
    """

    rows: Mapping[str, float] = by_name()
    tokens: Mapping[str, float] = by_name()
    kept: Mapping[str, float] = by_name()
    size: Mapping[str, float] = by_name()
    weight: Mapping[str, float] = by_name()
    trend: float = 0.0
    trend_variance: float = 0.0
    ranked: int = 0
    correlation: float = 0.0
    logged: int = 0
    agree: int = 0

    def share(self, third: str) -> float | None:
        """Share of the rows of a third that are within all bounds."""
        return ratio(self.kept.get(third, 0.0), self.rows.get(third, 0.0))

    def gap(self, third: str) -> float | None:
        """Mean size of the difference of its tokens."""
        return ratio(self.size.get(third, 0.0), self.tokens.get(third, 0.0))

    def length(self, third: str) -> float | None:
        """Mean trained tokens of its rows."""
        return ratio(self.tokens.get(third, 0.0), self.rows.get(third, 0.0))


@dataclass(frozen=True)
class SequenceIsLengthBias(Rule[LengthTally]):
    """Importance weights of whole sequences depend on their length, not on how far sampler and trainer differ.

    ## What it does
    Where weights or rejections are made of sums over the tokens of a response, compares short and long responses: how
    many are within the bounds, and how far their log-probs differ per token.

    ## Why it matters
    The log weight of a sequence is a sum: noise that is harmless for a token, 0.05 nats, makes a median weight of 0.90
    at 100 tokens, 0.30 at 1,000 and 0.007 at 4,000. Long responses lose their weight or are rejected, whatever they
    say, and the policy is trained on short ones.

    ## How it is measured
    Rows are cut into thirds by their trained tokens within each step (before rejection, where `response_mask_pre` says
    so). `kept_..._share` is the share within all bounds on sequences that the configuration has, `..._gap` the mean
    size of delta per token, `length_correlation` the rank correlation of length and |log weight| within a step,
    averaged over rows. A warning where the longest third keeps at least a tenth of its rows less than the shortest, or
    a twentieth less where the lost rows are longer than the others beyond chance (`lost_length_score`: four standard
    deviations of a permutation test of their lengths, within steps),
    with a difference per token of at most one and a half times theirs; where it is more, the mismatch itself grows
    along the response, and that is information, as is a correlation of 0.3 or more. Without a bound on sequences there
    is nothing to find, and responses of one length cannot show it.

    Logged metrics of the weights, all of which follow from the rows, confirm it.

    ## What to do
    Weigh tokens (truncated), or hold the geometric mean of a sequence to its bounds.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> lengths = [10] * 32 + [40] * 32
    >>> batch = toy_batch([[1, 0] * 4] * 8, lengths=lengths, policy=-1.0, rollout=-1.05)
    >>> diagnose_one("RDO007", batch, trainer="trl", use_vllm=True, vllm_importance_sampling_mode="sequence_mask")
    'RDO007 warning exposed: length_correlation 1'
    """

    code = "RDO007"
    name = "sequence-is-length-bias"
    references = (
        "https://github.com/huggingface/trl/pull/5815",
        "https://github.com/huggingface/trl/issues/4772",
        "https://github.com/NVIDIA-NeMo/RL/issues/1899",
    )
    tally = LengthTally
    splits = ("train",)
    stages = ("metrics",)

    least_rows: int = 60
    lost: float = 0.1
    lost_for_sure: float = 0.05
    """Enough where the lost rows are longer by `beyond_chance` standard deviations."""
    beyond_chance: float = 4.0
    same_gap: float = 1.5
    correlated: float = 0.3
    longer: float = 1.2

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs, where sequences are weighed."""
        return frozenset({"rollout_log_probs", "old_log_probs"}) if _bounds(context.objective) else frozenset()

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, the one before rejection, and what the metrics are made of."""
        if context.objective is None or not self.columns(context):
            return frozenset()
        return frozenset({"response_mask", "response_mask_pre"}) | loss_columns(context.objective) | LOGGED_COLUMNS

    def inapplicable_reason(self, context: Context) -> str | None:
        """Nothing is made of sums over sequences."""
        if context.objective is None or _bounds(context.objective):
            return None
        return "no importance weight or rejection is made of a sum over a sequence"

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sums over the trained tokens of each row."""
        import torch

        if not block.has("rollout_log_probs", "old_log_probs"):
            return {}
        apart_T = block.log_ratio("old_log_probs", "rollout_log_probs")
        mask_T = block.column("response_mask_pre") if block.is_logged("response_mask_pre") else block.trained_T
        counted_T = mask_T & apart_T.isfinite()
        apart_T = torch.where(counted_T, apart_T, 0.0).clamp_(-20, 20)
        return {
            "tokens": block.row_sum(counted_T),
            "k1": block.row_sum(apart_T),
            "k2": block.row_sum(apart_T.square() / 2),
            "k3": block.row_sum(torch.expm1(apart_T) - apart_T),
            "size": block.row_sum(apart_T.abs()),
        }

    def measure_each(self, steps: "StepView") -> list[LengthTally]:
        """Add up the thirds of each step."""
        import numpy as np

        from rolloutdoctor.ops.by_step import ByStep, named_counts
        from rolloutdoctor.ops.ranks import StepRanks

        row = steps.token_measures.get(self.code)
        bounds = _bounds(None if steps.evaluation is None else steps.evaluation.objective)
        if not row or not bounds:
            return steps.nothing(LengthTally)
        here_N = row["tokens"] > 0
        here_N &= steps.by_step.expand(steps.by_step.count(here_N) >= len(THIRDS))
        rows = ByStep.of_sizes(steps.by_step.count(here_N))
        sums = {name: row[name][here_N].cpu().numpy() for name in ("tokens", "k1", "k2", "k3", "size")}
        length, size = sums["tokens"], rows.size.repeat(rows.size)
        is_kept = np.ones(len(length), bool)
        for bound in bounds:
            is_kept &= (sums[bound.of] >= bound.low) & (sums[bound.of] <= bound.high)
        # Rows of one length are in one third.
        ranks = StepRanks(rows)
        by_length, by_weight = ranks.centred(length), ranks.centred(abs(sums["k1"]))
        third = ((by_length + size / 2) * len(THIRDS) / size).astype(np.int64)
        weight = np.exp(sums["k1"].clip(-20, 20))
        each = {"rows": None, "tokens": length, "kept": is_kept, "size": sums["size"], "weight": weight}
        apart, lost = length - rows.mean(length).repeat(rows.size), rows.count(~is_kept)
        # Drawn without putting back: the variance of a sum of some of the lengths.
        pairs = np.maximum(rows.size * (rows.size - 1), 1)
        spread = rows.sum(apart**2) * lost * (rows.size - lost) / pairs
        varies = rows.any(by_length != 0) & rows.any(by_weight != 0)
        return steps.tallies(
            LengthTally,
            **{name: named_counts(rows.histogram(third, len(THIRDS), x), THIRDS) for name, x in each.items()},
            trend=rows.sum(apart * ~is_kept),
            trend_variance=spread,
            ranked=np.where(varies, rows.size, 0),
            correlation=ranks.correlation(by_length, by_weight) * rows.size,
            logged=[sum(one.compared for one in _weight_metrics(each)) for each in steps.each],
            agree=[sum(one.agree for one in _weight_metrics(each)) for each in steps.each],
        )

    def measures(self, tally: LengthTally) -> Mapping[str, Measure]:
        """What the thirds keep."""
        found = {"length_correlation": Measure(ratio(tally.correlation, tally.ranked), "1")}
        for third in THIRDS:
            found[f"kept_{third}_share"] = Measure(tally.share(third), "share")
        for third in ("shortest", "longest"):
            found[f"{third}_gap"] = Measure(tally.gap(third), "nats")
            found[f"{third}_length"] = Measure(tally.length(third), "tokens")
            weight = ratio(tally.weight.get(third, 0.0), tally.rows.get(third, 0.0))
            found[f"{third}_weight"] = Measure(weight, "1")
        found["lost_length_score"] = Measure(ratio(tally.trend, tally.trend_variance**0.5), "1")
        found["rows"] = Measure(int(sum(tally.rows.values())), "rows")
        return found

    def vacuous_reason(self, run: LengthTally, context: Context) -> str | None:
        """Responses of one length cannot show it."""
        short, long = run.length("shortest"), run.length("longest")
        if not run.rows or (short is not None and long is not None and long >= self.longer * short):
            return None
        return "all responses have about the same length"

    def inconclusive_reason(self, run: LengthTally, context: Context) -> Missing | None:
        """Too few rows."""
        rows = sum(run.rows.values())
        if not _bounds(context.objective) or rows >= self.least_rows:
            return None
        return Missing(f"{counted(rows, 'row')} with both log-probs, and it takes {self.least_rows}", "widen --steps")

    def excluded(self, run: LengthTally, context: Context) -> Excluded | None:
        """How many more of the long responses may be lost than of the short ones."""
        if not run.ranked:
            return None
        (fewest, _), (_, most) = (
            share_bound(run.rows[third] - run.kept.get(third, 0.0), run.rows[third])
            for third in ("shortest", "longest")
        )
        return Excluded(
            code=self.code,
            effect="a loss of long responses",
            bound=most - fewest,
            unit="as a share of the rows, beyond that of short ones",
            estimate=(run.share("shortest") or 0.0) - (run.share("longest") or 0.0),
            limit=self.lost,
            seen=int(sum(run.rows.values())),
            of="rows",
        )

    def judge(self, run: LengthTally, context: Context) -> Judgement | None:
        """A warning where long responses are lost without differing more, else information."""
        shares, gaps = ([each("shortest"), each("longest")] for each in (run.share, run.gap))
        correlation = ratio(run.correlation, run.ranked)
        short, long = shares
        if sum(run.rows.values()) < self.least_rows or short is None or long is None or correlation is None:
            return None
        if self.vacuous_reason(run, context) is not None:
            return None
        sure = run.trend >= self.beyond_chance * run.trend_variance**0.5 > 0
        loses, more = short - long >= (self.lost_for_sure if sure else self.lost), ratio(gaps[1] or 0.0, gaps[0] or 0.0)
        is_same = more is None or more <= self.same_gap
        if not loses and correlation < self.correlated:
            return None
        bounds = _bounds(context.objective)
        shown = 0 < run.logged == run.agree
        rejects = any(bound.rejects for bound in bounds)
        words = "are kept" if rejects else "have a weight that is not cut"
        limits = ", ".join(
            f"{exp(bound.low):.3g} to {exp(bound.high):.3g}" if bound.of == "k1" else f"{bound.of} up to {bound.high:g}"
            for bound in bounds
        )
        return Judgement(
            severity=Severity.WARNING if loses and is_same else Severity.INFO,
            confirmed=shown,
            headline=f"{percent(long)} of the longest third of the responses {words}, {percent(short)} of the shortest"
            if loses
            else f"|log weight| of a sequence has a rank correlation of {number(correlation)} with its length; "
            f"{percent(long)} of the longest third {words}",
            message=(
                f"of the shortest third (mean {number(run.length('shortest'))} tokens) {percent(short)} {words}, of "
                "the "
                f"longest (mean {number(run.length('longest'))}) {percent(long)}; the log weight is a sum over tokens, "
                f"whose rank correlation with length is {number(correlation)}"
                + ("" if is_same else "; the mismatch itself is larger in long responses")
            ),
            evidence=(
                f"sampler and trainer differ by {number(gaps[0])} nats a token in the shortest third and "
                f"{number(gaps[1])} in the longest; bounds of the configuration: {limits}"
                + (f"; all {run.logged:,} logged metrics of the weights follow from these rows" if shown else "")
            ),
            advice="use token-level weights, or bound the geometric mean of the ratios of a sequence",
        )


def _weight_metrics(step: "StepView") -> "list[QuantityTally]":
    """Logged metrics of the importance weights and of what these are made of."""
    trainer = step.trainer
    return [] if trainer is None else [x for name, x in step.audit.items() if trainer.kind_of(name) == "sampler_gap"]
