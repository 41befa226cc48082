"""Data of pictures: plain numbers, gathered in one pass over a run, that every view can draw."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.results.vitals import Vital


@dataclass(frozen=True)
class Band:
    """Some consecutive steps of a run.

    Attributes:
        first_step: lowest step in it.
        last_step: highest step in it.
        before: values as configured.
        after: values with the fix, or None.
        flipped: how many of them the fix gives the other sign.
    """

    first_step: int
    last_step: int
    before: Histogram
    after: Histogram | None = None
    flipped: int = 0

    def __add__(self, other: "Band") -> "Band":
        first, last = min(self.first_step, other.first_step), max(self.last_step, other.last_step)
        after = _both(self.after, other.after)
        return Band(first, last, self.before + other.before, after, self.flipped + other.flipped)


MOST_BANDS = 12


def banded(bands: Iterable[Band]) -> tuple[Band, ...]:
    """Add up neighbours until at most `MOST_BANDS` are left, each of 1, 2, 4, ... steps; in step order.

    The order in which steps come, and which of them were added up before, makes no difference.
    """
    ordered, width = sorted(bands, key=lambda band: band.first_step), 1
    while any(band.first_step // width < band.last_step // width for band in ordered) or (
        len({band.first_step // width for band in ordered}) > MOST_BANDS
    ):
        width *= 2
    cells: dict[int, Band] = {}
    for band in ordered:
        index = band.first_step // width
        cells[index] = cells[index] + band if index in cells else band
    return tuple(cells.values())


def _both(left: Histogram | None, right: Histogram | None) -> Histogram | None:
    return left if right is None else right if left is None else left + right


@dataclass(frozen=True)
class AdvantagesData:
    """Advantages of the trained rows, or of the trained tokens where they have a time axis.

    Attributes:
        unit: ``rows`` or ``tokens``.
        before: as configured.
        fix: what `after` was computed with, or None.
        after: with the fix, or None.
        flipped: advantages before, of the values whose sign the fix turns.
        changed: values that the fix changes beyond rounding.
        bands: the same by step, at most `MOST_BANDS` bands.
        logged: the same values as logged, or None.
        differ: values of rows that were logged, and differ from those as configured by more than rounding.
    """

    unit: str
    before: Histogram
    fix: str | None = None
    after: Histogram | None = None
    flipped: Histogram = field(default_factory=Histogram)
    changed: int = 0
    bands: tuple[Band, ...] = ()
    logged: Histogram | None = None
    differ: int = 0

    def __add__(self, other: "AdvantagesData") -> "AdvantagesData":
        return AdvantagesData(
            max(self.unit, other.unit),
            self.before + other.before,
            self.fix,
            _both(self.after, other.after),
            self.flipped + other.flipped,
            self.changed + other.changed,
            banded([*self.bands, *other.bands]),
            _both(self.logged, other.logged),
            self.differ + other.differ,
        )


@dataclass(frozen=True)
class KlData:
    """KL from the reference, in nats; series have one entry a step, NaN where there is none.

    Attributes:
        metric: the trainer's name of the logged series.
        estimator: of the tokens.
        steps: optimizer steps.
        logged: as logged.
        recomputed: from the log-probs, by the trainer's definition of the metric.
        inverted: solved back out of a series that holds the reward.
        fix: what `after` was computed with, or None.
        after: the metric with the fix, or empty.
        tokens: per-token values of the trained tokens that carry the KL term.
        tokens_after: the same with the fix, or None.
    """

    metric: str
    estimator: str
    steps: tuple[int, ...]
    logged: tuple[float, ...]
    recomputed: tuple[float, ...]
    inverted: tuple[float, ...]
    tokens: Histogram
    fix: str | None = None
    after: tuple[float, ...] = ()
    tokens_after: Histogram | None = None


@dataclass(frozen=True)
class BaselineData:
    """Movement of a group's baseline when only some rows count in it.

    Attributes:
        fix: what the baseline is compared with.
        points: share of the group's rows without a trained token, drift of the baseline in units of reward (as
            configured minus with the fix, mean over the group's live rows), and the number of such groups.
        drift: of the groups with at least one such row.
        untouched: groups without such a row.
        undefined: groups with such a row whose drift is not defined: no live row, or a reward is unknown.
        moved: groups whose baseline drifts.
        largest: size of the largest drift.
    """

    fix: str
    points: tuple[tuple[float, float, int], ...]
    drift: Histogram
    untouched: int
    undefined: int
    moved: int = 0
    largest: float = 0.0


@dataclass(frozen=True)
class LossData:
    """The loss and its two parts; one entry a step, NaN where it is not defined.

    Attributes:
        steps: optimizer steps.
        policy: the policy part.
        kl: the KL part, coefficient included.
        logged: the loss that the trainer logged.
    """

    steps: tuple[int, ...]
    policy: tuple[float, ...]
    kl: tuple[float, ...]
    logged: tuple[float, ...]


@dataclass(frozen=True)
class GradientData:
    """The gradient with respect to the logged log-probs, L1; one entry a step, NaN where it is not defined.

    Attributes:
        fix: what the gradient is compared with, or None.
        steps: optimizer steps.
        whole: L1 norm of the gradient.
        policy: L1 norm of the policy part.
        kl: L1 norm of the KL part.
        spurious: L1 norm of what the fix changes, over that of the gradient.
        cosine: of the angle between the gradients with and without the fix.
    """

    fix: str | None
    steps: tuple[int, ...]
    whole: tuple[float, ...]
    policy: tuple[float, ...]
    kl: tuple[float, ...]
    spurious: tuple[float, ...]
    cosine: tuple[float, ...]


@dataclass(frozen=True)
class RatioData:
    """Importance ratios of the trained tokens that carry the policy term, and how far sampler and trainer disagree.

    Attributes:
        old: the column that the policy's log-probs are compared with.
        on_policy: True if that column and the policy's log-probs are one.
        log_ratio: natural logarithm of the ratio.
        gap: `gap_of` minus the sampler's log-probs in nats, or None if the sampler's were not logged.
        gap_of: the column that the sampler's log-probs are taken from.
        clip_low: how far below one the ratio may fall.
        clip_high: how far above one it may rise.
        steps: optimizer steps.
        below: share of the step's finite ratios that are below the clip range.
        above: share of the step's finite ratios that are above it.
        outside: tokens of the run with a ratio below or above it.
        mean_gap: mean absolute gap of the step, or empty.
        fix: what the last two were computed with, or None.
        log_ratio_after: of the tokens that carry the policy term with the fix, or None.
        outside_after: share of the step's finite ratios that are outside the range with the fix, or empty.
    """

    old: str
    on_policy: bool
    log_ratio: Histogram
    gap: Histogram | None
    gap_of: str
    clip_low: float
    clip_high: float
    steps: tuple[int, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]
    outside: int = 0
    mean_gap: tuple[float, ...] = ()
    fix: str | None = None
    log_ratio_after: Histogram | None = None
    outside_after: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mark:
    """Mark that a finding adds to a picture: a line through log-probs, or a step.

    Attributes:
        code: of the rule.
        words: what it is, short.
        slope: of the sampler's log-prob on the trainer's; None: it is no such line.
        offset: the sampler's log-prob where the trainer's is 0, in nats; NaN: that of the tokens of the picture.
        step: the step that is marked, or None.
        label: what the legend says; empty: the name of the rule.
    """

    code: str
    words: str
    slope: float | None = None
    offset: float = 0.0
    step: int | None = None
    label: str = ""


@dataclass(frozen=True)
class Spread:
    """Sizes of gaps that have something in common.

    Attributes:
        first: lowest step, position or lag.
        last: highest.
        tokens: trained tokens to which the sampler gave less than 0.9.
        median: of their gaps, in nats; NaN of too few.
        upper: the size that nine tenths of them stay below.
    """

    first: int
    last: int
    tokens: int
    median: float
    upper: float


@dataclass(frozen=True)
class MismatchData:
    """The sampler's log-probs against the trainer's, on trained tokens.

    Attributes:
        compared: the column that the trainer's log-probs are taken from.
        low: lower end of the grid, in nats; the upper end is 0.
        counts: tokens in each cell: a row for each bin of the sampler's log-prob, from the lowest.
        tokens: tokens that were looked at.
        outside: of these, tokens outside of the grid.
        by_step: sizes of the gap by step.
        by_position: by place in the response.
        by_lag: by how many versions a row is behind the newest of its step; empty without version stamps.
        sampled: True if only some tokens of long steps were looked at.
        marks: what rules found.
    """

    compared: str
    low: float
    counts: tuple[tuple[int, ...], ...]
    tokens: int
    outside: int
    by_step: tuple[Spread, ...]
    by_position: tuple[Spread, ...]
    by_lag: tuple[Spread, ...] = ()
    sampled: bool = False
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class LengthsData:
    """Lengths of responses and their ends; series have one entry a step, NaN where there is none.

    Attributes:
        lengths: response tokens of all rows.
        truncated_lengths: of the rows that were cut off, or None where nothing says which.
        steps: optimizer steps.
        lower: a tenth of the step's rows are no longer than this.
        median: of the step's rows.
        upper: nine tenths are no longer.
        longest: largest length of the step.
        truncated: share of rows that were cut off: by their status, else by the largest length of the run.
        ended: share of rows whose last token is one of the end tokens, or empty.
        by_status: what `truncated` rests on: True: the column status.
        end_tokens: ids that finished rows end with, the commonest first.
        middle: median length of all rows, a length that a row has (of an even number the smaller middle one); or None.
        truncated_rows: rows that were cut off, as in `truncated`.
        ended_rows: rows whose last token is one of the end tokens.
    """

    lengths: Histogram
    truncated_lengths: Histogram | None
    steps: tuple[int, ...]
    lower: tuple[float, ...]
    median: tuple[float, ...]
    upper: tuple[float, ...]
    longest: tuple[float, ...]
    truncated: tuple[float, ...]
    ended: tuple[float, ...] = ()
    by_status: bool = False
    end_tokens: tuple[int, ...] = ()
    middle: int | None = None
    truncated_rows: int = 0
    ended_rows: int = 0


@dataclass(frozen=True)
class RewardSeries:
    """Values of a reward by step, NaN where no response has a finite one.

    Attributes:
        name: of the reward function; ``reward`` is the whole.
        mean: of the step's responses.
        lower: a tenth of them are no larger.
        upper: nine tenths are no larger.
    """

    name: str
    mean: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]


@dataclass(frozen=True)
class RewardsData:
    """Rewards by function, and how many responses of each group pass.

    Attributes:
        steps: optimizer steps.
        series: the whole reward and its functions.
        passing: name of the reward of two values, of which the larger passes; empty: none has two.
        size: responses of a group, those of most; 0 without groups.
        shares: share of the step's groups of two responses or more in which none, some and all pass, from none to all:
            with up to 8 responses one for each number of them, else nine of equal width. NaN without such a group.
        equal: share of these groups in which all rewards are equal.
        groups: number of them.
        all_fail: of these, groups in which none passes.
        all_pass: groups in which all pass.
        all_equal: groups of equal rewards.
    """

    steps: tuple[int, ...]
    series: tuple[RewardSeries, ...]
    passing: str = ""
    size: int = 0
    shares: tuple[tuple[float, ...], ...] = ()
    equal: tuple[float, ...] = ()
    groups: int = 0
    all_fail: int = 0
    all_pass: int = 0
    all_equal: int = 0


@dataclass(frozen=True)
class OverviewData:
    """What the trainer logged over the run.

    Attributes:
        vitals: the quantities, with the steps at which findings begin.
        headlines: code of a rule to what its finding says, in the order of the report.
    """

    vitals: tuple[Vital, ...] = ()
    headlines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditedQuantity:
    """Logged values of one quantity beside the recomputed ones, or the sides of an identity between metrics.

    Attributes:
        quantity: ``advantages``, ``kl`` (stored per token), the name of a metric, or an identity.
        compared: values that were compared.
        agree: those within their rounding radius.
        not_compared: logged values that could not be compared.
        steps: optimizer steps with a value that was compared.
        worst: largest difference of each step, in radii; at most 1 agrees.
        points: logged and recomputed values and their difference in radii: some of those that agree and of those
            that do not, always the worst.
        after: largest difference of each step under the fix, NaN where there is none; empty without a fix.
        agree_after: values that agree under the fix.
        with_fixes: known fixes with which the run was made, so that its values agree.
        fault: code of the rule that reports a fault of the release with which the values agree; empty: none.
    """

    quantity: str
    compared: int
    agree: int
    not_compared: int
    steps: tuple[int, ...]
    worst: tuple[float, ...]
    points: tuple[tuple[float, float, float], ...]
    after: tuple[float, ...] = ()
    agree_after: int = 0
    with_fixes: tuple[str, ...] = ()
    fault: str = ""

    @property
    def differs(self) -> bool:
        """True if some values do not agree, and no known fix says why."""
        return self.agree < self.compared and not self.with_fixes


@dataclass(frozen=True)
class AuditData:
    """Logged values against recomputed ones.

    Attributes:
        quantities: those that differ first, each in the order in which a trainer computes them.
        fix: what `after` was computed with, or None.
        of_log: True of a log alone: the quantities are identities between its metrics.
    """

    quantities: tuple[AuditedQuantity, ...] = ()
    fix: str | None = None
    of_log: bool = False


PictureData = (
    OverviewData
    | AuditData
    | AdvantagesData
    | KlData
    | BaselineData
    | GradientData
    | LossData
    | RatioData
    | MismatchData
    | LengthsData
    | RewardsData
)

KINDS: dict[str, tuple[str, ...]] = {
    "overview": ("RDT", "RDO012", "RDG012", "RDG013"),
    "audit": ("RDA004", "RDG005", "RDM004", "RDM008"),
    "rewards": ("RDA009", "RDA011", "RDA014", "RDA015", "RDA016", "RDA019"),
    "advantages": ("RDA",),
    "kl": ("RDM001",),
    "baseline": (),
    "loss": ("RDG002", "RDG003", "RDG004"),
    "gradient": ("RDG",),
    "ratio": (),
    "mismatch": ("RDO",),
    "lengths": ("RDI009",),
}
"""Every picture, and how the codes of the findings begin that it shows; the first one that fits is taken."""


ASKED = ("why",)
"""Pictures that answer a question, so that only `plot` draws them."""


def known_kind(kind: str) -> str:
    """Return the kind.

    Raises:
        UsageError: if there is no such picture.
    """
    kinds = [*KINDS, *ASKED]
    if kind not in kinds:
        raise UsageError(f"no picture {kind!r} (known: {', '.join(kinds)}){nearest(kind, kinds)}")
    return kind


@dataclass(frozen=True)
class Gallery:
    """The pictures of a run.

    Attributes:
        drawn: kind to what it is made of.
        left_out: kind to why it cannot be made, and what would help.
    """

    drawn: dict[str, PictureData]
    left_out: dict[str, str]
