"""Cells of a comparison for people: which numbers a table shows, under which names, and how they are written."""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from rolloutdoctor.results.comparison import Comparison, Effect, Pair, Slice
from rolloutdoctor.results.findings import Measure
from rolloutdoctor.views.style import plain, shown

SIDES = (
    ("loss", "loss"),
    ("policy loss", "policy_loss"),
    ("KL loss", "kl_loss"),
    ("KL of the loss, per token", "kl"),
    ("gradient L1, all steps", "grad_l1"),
    ("gradient L2, all steps", "grad_l2"),
)
"""Rows of the table of both sides: name, and the stem of two measures."""

PART_HEAD = ("rows", "changed", "shift", "loss", "after", "spurious", "kappa")
_PART_MEASURES = (
    "unmasked_rows", "changed_rows", "advantage_shift_mean", "loss_before", "loss_after", "spurious_share_l1", "kappa",
)  # fmt: skip
_EFFECT_MEASURES = ("changed_rows", "loss_after", "spurious_share_l1", "kappa", "cosine")
SPACES = (
    "Gradients are with respect to the logged log-probs, not to parameters. spurious: sum |g - g_after| / sum |g|; "
    "kappa: <g, g_after> / |g_after|^2 (1 = same step size)."
)


_TIMES = 10
"""Multiple from which on a change is no percentage any more."""


def number(value: float | int | None) -> str:
    """A number for people; a dash where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "n/a"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def change(before: float | int | None, after: float | int | None, about_0: float = 0.0) -> str:
    """The change in per cent of the side before; in absolute numbers where that is about 0."""
    if before is None or after is None or not math.isfinite(before) or not math.isfinite(after):
        return ""
    if before == after:
        return "same"
    if abs(before) <= about_0:
        return f"{after - before:+.3g}"
    share = (after - before) / abs(before)
    # As everywhere, a multiple from ten times on.
    return f"{100 * share:+.3g} %" if abs(share) < _TIMES else f"{after / before:,.0f} times"


def sides(effect: Effect) -> list[list[str]]:
    """Lines of the table of both sides, of those that were computed; those of a KL that is in no loss are left out."""
    lines = []
    for name, stem in SIDES:
        before, after = effect.total[f"{stem}_before"].value, effect.total[f"{stem}_after"].value
        if (before is not None or after is not None) if "KL" not in name else (before or after):
            lines.append([name, number(before), number(after), change(before, after, effect.nearly_zero(name))])
    return lines


def moved_metrics(effect: Effect) -> list[list[str]]:
    """Lines of the table of metrics, of those that change."""
    return [
        [
            plain(name, 40),
            number(pair.before),
            number(pair.after),
            change(pair.before, pair.after, effect.nearly_zero(name)),
        ]
        for name, pair in effect.metrics.items()
        if pair.before != pair.after
    ]


def advantages(total: Mapping[str, Measure]) -> str:
    """Describe the change of advantages in a sentence."""
    rows = total["changed_rows"]
    if rows.value is None:
        return "not computed"
    live = total["unmasked_rows"]
    if not rows.value:
        return f"none of {shown(live)} unmasked rows changes"
    words = f"{shown(rows)} of {shown(live)} unmasked rows"
    if total["groups"].value:
        words += f" in {shown(total['changed_groups'])} of {shown(total['groups'])} groups"
    words += (
        f" change, by {shown(total['advantage_shift_mean'])} on average and {shown(total['advantage_shift_max'])} at "
        f"most; sign flips: {shown(total['sign_flips'])}"
    )
    if total["undefined_rows"].value:
        words += f"; {shown(total['undefined_rows'])} are NaN on one side"
    return words


def verdict(effect: Effect) -> str:
    """Say in a sentence what a change does to advantages, gradient and loss."""
    label, total = plain(effect.label, 200), effect.total
    start = label[:1].upper() + label[1:] if label.startswith("without") else f"With {label},"
    same = "the same advantages, gradient and loss"
    if total["grad_l1_before"].value is None:
        same = "the same advantages, and no loss to compare"
    if not effect.differs:
        return f"{start} nothing changes: {same}."
    phrases = []
    if total["changed_rows"].value:
        flips = f" ({shown(total['sign_flips'])} flip sign)" if total["sign_flips"].value else ""
        phrases.append(f"{shown(total['changed_rows'])} of {shown(total['unmasked_rows'])} advantages change{flips}")
    share = total["spurious_share_l1"].value
    if share:
        phrases.append(f"{shown(total['spurious_share_l1'])} of the log-prob gradient differs")
    before, after = total["loss_before"].value, total["loss_after"].value
    if before != after and before is not None and after is not None:
        phrases.append(f"the mean loss goes from {number(before)} to {number(after)}")
    if not phrases:
        return f"{start} only logged metrics change: {same}."
    return f"{start} {', '.join(phrases[:-1])}{' and ' if phrases[1:] else ''}{phrases[-1]}."


def baselines(total: Mapping[str, Measure]) -> str:
    """Describe the change of baselines in a sentence; empty if there is none."""
    if not total["drifted_rows"].value:
        return ""
    return (
        f"drift for {shown(total['drifted_rows'])} unmasked rows, by {shown(total['baseline_drift_mean'])} on average "
        f"and {shown(total['baseline_drift_max'])} at most"
    )


def gradient(total: Mapping[str, Measure]) -> str:
    """Describe the change of the gradient in a few words; empty if there is none."""
    if total["grad_l1_before"].value is None:
        return ""
    share = "KL-only share" if "kl_only_share_l1" in total else "spurious share"
    return (
        f"{share} {shown(total['spurious_share_l1'])} (L1), relative change "
        f"{shown(total['relative_change_l1'])} (L1), kappa {shown(total['kappa'])}, cosine {shown(total['cosine'])}"
    )


def most_changed(parts: Sequence[Slice], keep: int) -> tuple[Sequence[Slice], int]:
    """The parts that change most, in their order, and how many are left out."""
    if len(parts) <= keep:
        return parts, 0

    def weight(place: int) -> float:
        measures = parts[place].measures
        share, gradient = measures["spurious_share_l1"].value, measures["grad_l1_before"].value
        if share is None or gradient is None:
            return float(measures["changed_rows"].value or 0)
        return share * gradient if math.isfinite(share * gradient) else math.inf

    chosen = sorted(range(len(parts)), key=lambda place: (-weight(place), place))[:keep]
    return [parts[place] for place in sorted(chosen)], len(parts) - keep


def part_lines(parts: Sequence[Slice]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table of parts."""
    keys = [key for key in (parts[0].where if parts else ()) if key != "split"]
    head = [{"group_id": "group", "length": "trained tokens"}.get(key, key) for key in keys]
    lines = [
        [*(plain(part.where[key], 24) for key in keys), *(_short(part.measures[name]) for name in _PART_MEASURES)]
        for part in parts
    ]
    return [*head, *PART_HEAD], lines


def _short(measure: Measure) -> str:
    """A measure in few characters."""
    if isinstance(measure.value, float) and measure.unit != "share":
        return f"{measure.value:.3g}" if math.isfinite(measure.value) else "n/a"
    return "-" if measure.value is None else shown(measure)


def effect_lines(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of all effects: as configured, all together, and each alone."""
    head = ["", "changed", "loss", "spurious", "kappa", "cosine"]
    lines = [["as configured", "", _short(result.effects[0].total["loss_before"]), "", "", ""]]
    for effect in result.effects:
        name = "together" if effect.joint else plain(effect.label, 60)
        lines.append([name, *(_short(effect.total[measure]) for measure in _EFFECT_MEASURES)])
    return head, lines


EVERY_HEAD = ("fix", "advantages", "flips", "spurious", "cosine", "loss", "metrics")
_MOST_METRICS = 4
"""Metrics that are named of each fix."""


def every_lines(result: Comparison) -> list[list[str]]:
    """Lines of the table of every fix that changes something, the largest first."""
    lines = []
    for effect in filter(attrgetter("differs"), result.effects):
        total = effect.total
        cells = [_short(total[name]) for name in ("changed_rows", "sign_flips", "spurious_share_l1", "cosine")]
        loss = change(total["loss_before"].value, total["loss_after"].value, effect.nearly_zero("loss"))
        lines.append([plain(effect.label, 40), *cells, loss, f"{len(moved_metrics(effect)):,}"])
    return lines


def every_remark(result: Comparison) -> Iterator[tuple[str, str]]:
    """Yield a word and a sentence: of the metrics that each fix changes, and of the fixes that are not in the table."""
    for effect in filter(attrgetter("differs"), result.effects):
        moved = {name: pair for name, pair in effect.metrics.items() if pair.before != pair.after}
        most = sorted(moved, key=lambda name: -_relative(moved[name]))[:_MOST_METRICS]
        remarks = [
            f"{plain(name, 40)} {number(moved[name].before)} to {number(moved[name].after)} "
            f"({change(moved[name].before, moved[name].after, effect.nearly_zero(name)) or 'not defined on one side'})"
            for name in most
        ]
        if remarks:
            more = f", and {len(moved) - len(remarks):,} more" if len(moved) > len(remarks) else ""
            yield "metrics", f"{plain(effect.label, 40)}: {', '.join(remarks)}{more}"
    same = [plain(effect.label, 40) for effect in result.effects if not effect.differs]
    if same:
        yield "no change", ", ".join(same)
    for word, applies in (("no column", True), ("n/a", False)):
        reasons: dict[str, list[str]] = {}
        for fix in result.untried or ():
            if fix.applies is applies:
                reasons.setdefault(fix.why, []).append(fix.label)
        yield from ((word, f"{', '.join(labels)}: {why}") for why, labels in reasons.items())


def _relative(pair: Pair) -> float:
    """Size of a change in units of the side before; infinite where that is 0 or a side is not defined."""
    if pair.change is None or not pair.before or not math.isfinite(pair.change):
        return math.inf
    return abs(pair.change / pair.before)


def group_lines(effect: Effect, *, text: int) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield for each group that moved its title, and head and lines of the table of its rows.

    Args:
        effect: whose groups.
        text: characters of a text that are shown.
    """
    for group in effect.groups:
        where = f"step {group.step}, group {plain(group.group_id, 40)}"
        title = f"{where}: {number(group.moved)} over {number(group.size)} rows"
        if len(group.rows) < group.size:
            title += f", {len(group.rows)} of them here"
        prompts = dict.fromkeys(plain(row.prompt, text) for row in group.rows if row.prompt)
        if prompts:
            title += f"\nprompt {next(iter(prompts))}"
        with_text = any(row.response for row in group.rows)
        moves = any(row.advantage.before != row.advantage.after for row in group.rows)
        with_gradient = any(row.gradient.before is not None for row in group.rows)
        head = ["row", "reward", "advantage", *(["after"] if moves else [])]
        head += [*(["|gradient|", "after"] if with_gradient else []), *(["response"] if with_text else [])]
        lines = []
        for row in group.rows:
            pairs = [row.advantage.before, *([row.advantage.after] if moves else [])]
            pairs += [row.gradient.before, row.gradient.after] if with_gradient else []
            words = [plain(row.response or "", text)] if with_text else []
            lines.append([plain(row.sample_id, 24), number(row.reward), *map(number, pairs), *words])
        yield title, head, lines
