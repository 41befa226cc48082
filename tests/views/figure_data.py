"""Data of every figure, and what a figure says."""

import math
from dataclasses import replace

from rolloutdoctor.results.figures import (
    AdvantagesData,
    AuditData,
    AuditedQuantity,
    Band,
    BaselineData,
    GradientData,
    KlData,
    LengthsData,
    LossData,
    MismatchData,
    OverviewData,
    RatioData,
    RewardsData,
    RewardSeries,
    Spread,
)
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.results.ledger import Ledger, Line, Why
from rolloutdoctor.results.vitals import Vital

NAN = math.nan
SOME = Histogram(-2, -9, (4, 0, 3, 0, 0, 1, 9, 0, 2, 7, 0, 0, 5, 0, 3))
MOVED = Histogram(-2, -7, (4, 3, 1, 9, 2, 7, 5, 3))


def advantages(**changes):
    bands = (Band(0, 4, SOME, MOVED), Band(5, 9, MOVED, SOME))
    data = AdvantagesData("rows", SOME, "rejected-rows:singleton-raw", MOVED, Histogram(-2, 1, (2,)), 11, bands)
    return replace(data, **changes)


def kl(steps=12, **changes):
    series = tuple(0.01 * step for step in range(steps))
    inverted = tuple(value if step > 2 else NAN for step, value in enumerate(series))
    data = KlData("rollout/kl", "k1", tuple(range(steps)), tuple(-v for v in series), series, inverted, SOME)
    return replace(data, **changes)


def baseline(**changes):
    points = ((0.25, -0.5, 3), (0.5, 0.25, 1))
    return replace(BaselineData("rejected-rows:singleton-raw", points, MOVED, 7, 2, moved=4, largest=0.5), **changes)


def gradient(steps=12, **changes):
    one = (1.0,) * steps
    data = GradientData("zero-std:loss", tuple(range(steps)), one, one, (0.5,) * steps, (0.1,) * steps, (0.9,) * steps)
    return replace(data, **changes)


def loss(steps=12, **changes):
    series = tuple(0.01 * step for step in range(steps))
    return replace(LossData(tuple(range(steps)), (1e-9,) * steps, series, series), **changes)


def ratio(steps=12, **changes):
    low, high = (0.1,) * steps, (0.2,) * steps
    data = RatioData(
        "old_log_probs",
        False,
        SOME,
        MOVED,
        "old_log_probs",
        0.2,
        0.28,
        tuple(range(steps)),
        low,
        high,
        6,
        (0.1,) * steps,
    )
    return replace(data, **changes)


GRID = ((0, 2, 0, 0), (0, 9, 1, 0), (0, 0, 40, 3), (0, 0, 1, 500))


def spreads(count):
    return tuple(Spread(place, place, 200, 0.01 * (1 + place % 5), 0.05) for place in range(count))


def mismatch(steps=12, **changes):
    data = MismatchData("old_log_probs", -8.0, GRID, 560, 4, spreads(steps), spreads(5), spreads(3))
    return replace(data, **changes)


def lengths(steps=12, **changes):
    one = (40.0,) * steps
    half = (0.5,) * steps
    data = LengthsData(
        SOME, MOVED, tuple(range(steps)), one, (50.0,) * steps, (60.0,) * steps, (64.0,) * steps, half, half, True, (2,)
    )
    return replace(data, **changes)


def overview(steps=12, **changes):
    marks = {"kl": ((3, "RDT004"),), "entropy": ((5, "RDT003"), (6, "RDT003"))}
    vitals = (
        Vital(name, name, name, "nats", tuple(range(steps)), tuple(0.5 + step % 3 for step in range(steps)), found)
        for name, found in {"reward": (), **marks}.items()
    )
    return replace(OverviewData(tuple(vitals)[: 3 if steps else 0]), **changes)


def audit(steps=12, **changes):
    found = {"advantages": (90 * steps, 1e6), "loss": (steps, 0.02), "a = b + c" * 12: (steps, 0.0)}
    quantities = tuple(
        AuditedQuantity(
            name,
            compared,
            compared if worst < 1 else compared // 3,
            2,
            tuple(range(steps)),
            (worst,) * steps,
            ((1.0, 1.0, 0.0), (0.5, 0.75, worst)),
            (0.5,) * steps if worst > 1 else (NAN,) * steps,
            compared,
        )
        for name, (compared, worst) in found.items()
    )
    return replace(AuditData(quantities, "zero-std:loss"), **changes)


def rewards(steps=12, **changes):
    one, half = (1.0,) * steps, (0.5,) * steps
    series = tuple(
        RewardSeries(name, (mean,) * steps, (0.0,) * steps, one)
        for name, mean in {"reward": 0.75, "exact": 0.5, "length": 0.25}.items()
    )
    shares = (half, *((0.0,) * steps,) * 7, half)
    return replace(RewardsData(tuple(range(steps)), series, "exact", 8, shares, one, 4 * steps, 2, 1, 4), **changes)


def why(steps=12, **changes):
    """A waterfall of more lines than it has bars."""
    lines = [
        Line("verifier outage", -0.2, (-0.25, -0.15), ("4/g/1",), 32, "reward at 0 in 32 adjacent rows, step 4"),
        Line(
            "pass rate on equal prompts", 0.05, (-0.01, 0.1), ("5/g/1",), 64, "", {"groups": {"one": 0.03, "two": 0.02}}
        ),
        *(Line(f"reward function with a long name, number {number}", 0.01 * number, None) for number in range(12)),
    ]
    ledger = Ledger(4, (0, 3), (4, 7), 0.6, 0.6 + sum(line.share for line in lines), tuple(lines), 0.0)
    about = InputSummary(128, 8, 16, 900), "verl", "0.9.1", {}
    data = Why(
        "0", "cpu", "float32", *about, "reward", "reward", "reward", (ledger,) if steps else (), ("nothing moved",)
    )
    return replace(data, **changes)


MAKE = {
    "overview": overview,
    "audit": audit,
    "rewards": rewards,
    "advantages": advantages,
    "kl": kl,
    "baseline": baseline,
    "loss": loss,
    "gradient": gradient,
    "ratio": ratio,
    "mismatch": mismatch,
    "lengths": lengths,
    "why": why,
}
OF_FIXES = ("audit", "advantages", "kl", "baseline", "gradient", "ratio")
BY_STEP = ("audit", "rewards", "kl", "loss", "gradient", "ratio", "mismatch", "lengths")


def axes_of(figure):
    return {(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes}


def title_of(figure):
    return figure.get_suptitle().replace("\n", " ")


def note_of(figure):
    return figure.get_supxlabel().replace("\n", " ")


def legend_of(figure):
    return [text.get_text() for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()]


def heights(ax, index):
    return ax.patches[index].get_data().values.tolist()
