"""What is added up of the difference between sampler and trainer, and of what importance weights make of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from rolloutdoctor.ops.tally import Sums, by_name, first_names, largest, ratio
from rolloutdoctor.results.findings import Measure

PLACES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Positions in a response at which a bin of positions begins."""

OFTEN_KEPT = 64
"""Places of a confident disagreement that are told apart."""

TOKEN_CAP, TOKEN_BAND, ROW_CAP, ROW_BAND = 2.0, (0.5, 5.0), 3.0, (0.999, 1.001)
"""The usual bounds: truncated weights of tokens (verl), IcePop's mask, TRL's cap of sequences, verl's geometric "
"mean."""


FAR = 0.1
"""Nats between two log-probs beyond what kernels were reported to make of the same weights and inputs."""

MOST_FAR = 0.02
"""Share of such tokens in the other rows above which all rows are off, and none of them is apart."""


@dataclass(frozen=True)
class MismatchTally(Sums):
    """What `sampler-mismatch` adds up. `rows` and what follows it are of the sampled rows alone.

    Attributes:
        tokens: trained tokens with both log-probs.
        equal: those of steps in which every such token has the same one twice.
        confident: tokens that the sampler was sure of and the trainer was not.
        places: name of a prompt and position to how many of these are there.
        largest: largest absolute difference.
        rows: rows with such tokens.
        row_weight: sum of the rows' weights, the product of their tokens', cut at `ROW_CAP`.
        row_square: of their squares.
        rows_over: rows whose weight was cut.
        rows_near: rows whose geometric mean is within `ROW_BAND`.
        seen: tokens.
        sizes: bin of the absolute difference to tokens.
        off: tokens whose ratio is off by more than a tenth.
        weight: sum of the weights.
        square: of their squares.
        cut_weight: sum of the weights cut at `TOKEN_CAP`.
        cut_square: of their squares.
        inside: tokens within `TOKEN_BAND`.
        inside_weight: sum of their weights.
        inside_square: of their squares.
        at: number of a bin of positions to tokens.
        at_size: to the sum of their absolute differences.
        at_gap: to the sum of their differences.
        apart: rows of the newest version, half or more of whose tokens are further apart than `FAR`.
        apart_tokens: their tokens; of these and of those of other rows only such that a model was unsure of.
        beside: other rows.
        beside_tokens: their tokens.
        beside_far: those further apart than `FAR`.
        lag: version lag to tokens.
        lag_size: to the sum of their absolute differences.
        lag_k3: to the sum of k3.
    """

    tokens: int = 0
    equal: int = 0
    confident: int = 0
    places: Mapping[str, float] = first_names(OFTEN_KEPT)
    largest: float = largest()
    rows: int = 0
    row_weight: float = 0.0
    row_square: float = 0.0
    rows_over: int = 0
    rows_near: int = 0
    seen: int = 0
    sizes: Mapping[str, float] = by_name()
    off: int = 0
    weight: float = 0.0
    square: float = 0.0
    cut_weight: float = 0.0
    cut_square: float = 0.0
    inside: int = 0
    inside_weight: float = 0.0
    inside_square: float = 0.0
    at: Mapping[str, float] = by_name()
    at_size: Mapping[str, float] = by_name()
    at_gap: Mapping[str, float] = by_name()
    apart: int = 0
    apart_tokens: int = 0
    beside: int = 0
    beside_tokens: int = 0
    beside_far: int = 0
    lag: Mapping[str, float] = by_name()
    lag_size: Mapping[str, float] = by_name()
    lag_k3: Mapping[str, float] = by_name()

    @property
    def k3(self) -> float:
        """Sum of k3: exp(delta) - 1 - delta."""
        return self.weight - self.seen - sum(self.at_gap.values())

    def has_rows_apart(self, bits: float) -> bool:
        """True if some rows, half at most, are apart beyond chance, if it chose the far tokens, and the others agree.

        Of n tokens half are far with a probability below (4 p)^(n/2) if each is with p (Chernoff's bound).
        """
        share = (self.beside_far + 1) / (self.beside_tokens + 2)
        if not 0 < self.apart <= self.beside or share > MOST_FAR:
            return False
        chosen = self.apart * log2(self.apart + self.beside)
        return self.apart_tokens / 2 * log2(1 / (4 * share)) - chosen >= bits

    @property
    def measures(self) -> dict[str, Measure]:
        """The distribution of delta, and what weights would do."""
        from rolloutdoctor.ops.gap_bins import BINS, quantile

        seen, gap, size = self.seen, sum(self.at_gap.values()), sum(self.at_size.values())
        bins = [self.sizes.get(str(place), 0.0) for place in range(BINS)]
        early = [str(place) for place, start in enumerate(PLACES) if start < 16]
        late = [name for name in self.at if name not in early]

        def mean_at(names: list[str]) -> float | None:
            return ratio(sum(self.at_size.get(name, 0.0) for name in names), sum(self.at.get(n, 0.0) for n in names))

        def ess(total: float, squares: float, count: float) -> float | None:
            return ratio(total * total, squares * count)

        return {
            "mean_delta": Measure(ratio(gap, seen), "nats"),
            "mean_abs_delta": Measure(ratio(size, seen), "nats"),
            "p99_abs_delta": Measure(quantile(bins, 0.99) if seen else None, "nats"),
            "max_abs_delta": Measure(self.largest if self.tokens else None, "nats"),
            "off_by_tenth_share": Measure(ratio(self.off, seen), "share"),
            "k3": Measure(ratio(self.k3, seen), "nats"),
            "ess_share": Measure(ess(self.weight, self.square, seen), "share"),
            "rows_apart": Measure(self.apart, "rows"),
            "tokens": Measure(self.tokens, "tokens"),
            "sampled_tokens": Measure(seen, "tokens"),
            "mean_abs_delta_first_16": Measure(mean_at(early), "nats"),
            "mean_abs_delta_later": Measure(mean_at(late), "nats"),
            "cap_2_mass_share": Measure(ratio(self.cut_weight, self.weight), "share"),
            "cap_2_ess_share": Measure(ess(self.cut_weight, self.cut_square, seen), "share"),
            "cap_2_kappa": Measure(ratio(self.cut_weight, self.cut_square), "1"),
            "mask_tokens_share": Measure(ratio(self.inside, seen), "share"),
            "mask_mass_share": Measure(ratio(self.inside_weight, self.weight), "share"),
            "mask_ess_share": Measure(ess(self.inside_weight, self.inside_square, seen), "share"),
            "mask_kappa": Measure(ratio(self.inside_weight, self.inside_square), "1"),
            "sequence_cap_3_rows_share": Measure(ratio(self.rows_over, self.rows), "share"),
            "sequence_cap_3_ess_share": Measure(ess(self.row_weight, self.row_square, self.rows), "share"),
            "sequence_cap_3_kappa": Measure(ratio(self.row_weight, self.row_square), "1"),
            "geometric_kept_rows_share": Measure(ratio(self.rows_near, self.rows), "share"),
            "confident_tokens": Measure(self.confident, "tokens"),
            "confident_places": Measure(len(self.places), "places"),
        }
