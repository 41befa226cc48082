"""Baseline: how far fully masked responses shift the baseline of their group."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rolloutdoctor.pictures.style import DARK, INK, PALE, bars, blank, empty, many, short, value_limits
from rolloutdoctor.results.figures import BaselineData
from rolloutdoctor.results.histograms import on_one_grid


def title(data: BaselineData) -> str:
    """Summarise the picture in a sentence."""
    if not data.drift.total:
        return "No group has both fully masked and unmasked responses"
    if not data.moved:
        return f"{data.fix} changes none of the baselines of {many(data.drift.total, 'group')} with masked responses"
    groups = many(data.drift.total, "group")
    return f"Baselines of {data.moved:,} of {groups} with masked responses drift, by {short(data.largest)} at most"


def draw(data: BaselineData) -> Figure:
    """Draw drift against share, and the distribution of the drift beside it."""
    left_out = f"; {many(data.undefined, 'group')} without a defined drift left out" if data.undefined else ""
    note = f"drift: baseline as configured minus baseline with {data.fix}, mean over unmasked responses;\n"
    note += f"{many(data.untouched, 'group')} without fully masked responses not drawn (drift 0){left_out}"
    figure = blank(title(data), note)
    if not data.drift.total:
        ax = figure.add_subplot()
        empty(ax, f"no baseline drifts in {many(data.untouched, 'group')}{left_out}")
        return figure
    scatter, side = figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    most = max(count for _, _, count in data.points)
    crowded = len(data.points) > 300
    sizes = [(10 if crowded else 46) * (1 + 4 * (count - 1) / most) for _, _, count in data.points]
    shares = [100 * share for share, _, _ in data.points]
    drifts = [drift for _, drift, _ in data.points]
    scatter.scatter(shares, drifts, s=sizes, facecolor=DARK, linewidth=0, alpha=0.35 if crowded else 0.75)
    scatter.axhline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    scatter.set_xlim(0, max(52.0, max(shares) + 4))
    scatter.set_xlabel("fully masked responses of the group, %")
    scatter.set_ylabel("baseline drift, group mean (reward)")
    if most > 1:
        scatter.set_title(f"area: number of groups (up to {most:,})", fontsize=12)
    bins = on_one_grid([data.drift], most=41, zoom=False)
    bars(side, bins, 0, orientation="horizontal", fill=True, color=PALE)
    side.axhline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    side.set_xlabel(f"groups per bin of {short(bins.width)}")
    side.set_xlim(left=0)
    side.set_ylim(value_limits(bins))
    side.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    return figure
