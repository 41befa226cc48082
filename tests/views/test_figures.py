"""What each figure holds: axes with units, before and after, bins, and its sentence."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from views.figure_data import (
    GRID,
    MOVED,
    NAN,
    SOME,
    advantages,
    audit,
    axes_of,
    baseline,
    gradient,
    heights,
    kl,
    legend_of,
    lengths,
    mismatch,
    note_of,
    overview,
    ratio,
    title_of,
)

from rolloutdoctor.pictures.style import ALARM, DARK, words_alone
from rolloutdoctor.pictures.table import PICTURES, figure_of
from rolloutdoctor.results.figures import AdvantagesData, Band, GradientData, Mark
from rolloutdoctor.results.histograms import Histogram


def test_advantages_before_and_after_lie_over_each_other():
    figure = figure_of("advantages", advantages())
    ax, flips = figure.axes
    assert ax.get_ylabel() == "rows per bin of 0.111"
    assert legend_of(figure) == ["as configured", "with rejected-rows:singleton-raw"]
    assert sum(heights(ax, 0)) == SOME.total
    assert sum(heights(ax, 1)) == MOVED.total
    # Few among many have an axis of their own, over the same values.
    assert flips.get_ylabel() == "sign\nflips"
    assert sum(heights(flips, 0)) == 2
    assert flips.get_ylim()[1] < 3 < ax.get_ylim()[1]
    assert flips.get_xlim() == ax.get_xlim()
    assert len(figure_of("advantages", advantages(flipped=Histogram())).axes) == 1
    assert [line.get_xdata() for line in ax.lines] == [[0, 0]]
    edges = ax.patches[0].get_data().edges
    # A bin is centred on zero, so that it mixes no signs.
    assert any(math.isclose(left, -right) for left, right in pairwise(edges))
    assert title_of(figure) == ("rejected-rows:singleton-raw changes the advantage of 11 of 34 rows; 2 signs flipped")


def test_advantages_by_step_has_a_ridge_for_each_band():
    figure = figure_of("advantages", advantages(), by_step=True)
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0–4", "5–9"]
    assert [text.get_text() for text in ax.texts] == []
    turned = replace(advantages(), bands=(Band(0, 4, SOME, MOVED, 2), Band(5, 9, SOME, MOVED, 0)))
    (ax,) = figure_of("advantages", turned, by_step=True).axes
    # Beside the curves, not over them.
    (told,) = ax.texts
    assert told.get_text() == "2 signs\nflipped"
    assert (told.get_position()[0] > 1, told.get_ha()) == (True, "left")
    assert len(ax.patches) == 4
    assert ax.patches[0].get_facecolor() != ax.patches[1].get_facecolor()


def test_kl_shows_logged_recomputed_solved_back_and_tokens():
    figure = figure_of("kl", kl())
    assert axes_of(figure) == {
        ("optimizer step", "rollout/kl, nats"),
        ("optimizer step", "KL, nats"),
        ("KL of one token (k1), nats; 34 trained tokens with a KL term", "tokens per bin\nof 0.111 (log)"),
    }
    first = ["recomputed", "disagreement", "as logged"]
    assert legend_of(figure) == [*first, "recomputed", "recovered from the logged values"]
    assert figure.axes[0].lines[1].get_ydata()[5] == -0.05
    without = figure_of("kl", kl(inverted=(NAN,) * 12, fix="kl-inplace:copy", after=(0.5,) * 12))
    assert len(without.axes) == 2
    assert legend_of(without) == [*first, "with kl-inplace:copy"]
    fixed = figure_of("kl", kl(fix="zero-std:loss", tokens_after=Histogram(-2, 0, (3,))))
    assert legend_of(fixed)[-2:] == ["as configured (34)", "with zero-std:loss (3)"]
    assert sum(heights(fixed.axes[-1], 1)) == 3


def test_baseline_shows_points_and_their_distribution():
    figure = figure_of("baseline", baseline())
    scatter, side = figure.axes
    assert scatter.get_xlabel() == "fully masked responses of the group, %"
    assert scatter.get_ylabel() == "baseline drift, group mean (reward)"
    assert scatter.collections[0].get_offsets().tolist() == [[25.0, -0.5], [50.0, 0.25]]
    assert sum(heights(side, 0)) == MOVED.total
    assert "7 groups without fully masked responses not drawn" in note_of(figure)
    assert title_of(figure) == "Baselines of 4 of 34 groups with masked responses drift, by 0.5 at most"
    still = baseline(points=((0.5, 0.0, 4),), moved=0, largest=0.0)
    words = "rejected-rows:singleton-raw changes none of the baselines of 34 groups with masked responses"
    assert title_of(figure_of("baseline", still)) == words


def test_gradient_shows_both_parts_and_says_in_which_space():
    figure = figure_of("gradient", gradient())
    share, parts, angle = figure.axes
    assert share.get_ylabel() == "share that the\nfix changes, %"
    assert parts.get_ylabel() == "|gradient|, L1 (log)\n(log-prob space)"
    assert angle.get_ylabel() == "cosine with\nthe fixed one"
    assert "not to parameters" in note_of(figure)
    # A small part is seen beside a large one, and a part that is 0 is counted.
    assert parts.get_yscale() == "log"
    assert [list(line.get_ydata()) for line in parts.lines] == [[1.0] * 12, [0.5] * 12]
    assert legend_of(figure) == ["policy part", "KL part"]
    some = gradient(policy=(0.0, 0.0, *(1.0,) * 10))
    assert legend_of(figure_of("gradient", some)) == ["policy part (0 in 2 steps)", "KL part"]
    assert title_of(figure) == "zero-std:loss changes 10 % of the gradient"


def test_a_cosine_of_one_is_a_sentence_and_lone_steps_are_stems():
    data = gradient(cosine=(0.99996,) * 12, spurious=(0.0,) * 5 + (1.0,) + (0.0,) * 6)
    figure = figure_of("gradient", data)
    share, _ = figure.axes
    assert "cosine with the fixed gradient 0.99996 or more where neither is 0" in note_of(figure)
    (stem,) = share.collections[0].get_segments()
    assert stem.tolist() == [[5, 0], [5, 100]]
    # Of a long run a lone step is not averaged away.
    spurious = tuple(float(step == 777) for step in range(1500))
    series = (1.0,) * 1500
    long = GradientData("zero-std:loss", tuple(range(1500)), series, series, series, spurious, series)
    figure = figure_of("gradient", long)
    assert [stem.tolist()[1][1] for stem in figure.axes[0].collections[0].get_segments()] == [100]
    assert "no cosine" in note_of(figure_of("gradient", gradient(cosine=(NAN,) * 12)))


def test_a_spike_at_zero_does_not_hide_the_rest():
    spike = Histogram(0, -1, (10, 900, 12))
    ax, *_ = figure_of("advantages", AdvantagesData("rows", spike)).axes
    assert ax.get_ylim() == (0, 1.3 * 12)
    assert [text.get_text() for text in ax.texts] == ["↑ 900 in the bin at 0"]
    data = AdvantagesData("rows", spike, "x", Histogram(0, -1, (20, 880, 12)), changed=20)
    assert [text.get_text() for text in figure_of("advantages", data).axes[0].texts] == [
        "↑ 900 in the bin at 0, 880 with the fix"
    ]
    flat = AdvantagesData("rows", Histogram(0, -1, (10, 15, 12)))
    assert not figure_of("advantages", flat).axes[0].texts


def test_logged_advantages_are_drawn_where_they_differ():
    same, other = advantages(logged=SOME), advantages(logged=Histogram(-2, -9, (0,) * 14 + (34,)))
    assert "the logged advantages have the same distribution" in note_of(figure_of("advantages", same))
    assert "as logged" not in legend_of(figure_of("advantages", same))
    assert "as logged" in legend_of(figure_of("advantages", other))
    assert "logged" not in note_of(figure_of("advantages", advantages()))
    told = PICTURES["advantages"].title(advantages(fix=None, after=None, differ=11))
    assert told == "11 of 34 logged advantages differ from the recomputed ones"


def test_equal_lines_are_one_line_and_a_sentence():
    values = tuple(1.0 + step for step in range(12))
    near = tuple(value + 1e-6 for value in values)
    figure = figure_of("kl", kl(logged=near, recomputed=values, inverted=(NAN,) * 12))
    assert (
        title_of(figure) == "rollout/kl: logged and recomputed are at most 1e-06 nats apart in 12 steps, mean 6.5 nats"
    )
    assert legend_of(figure) == ["logged and recomputed"]
    equal = PICTURES["kl"].title(kl(logged=values, recomputed=values, inverted=(NAN,) * 12))
    assert equal == "rollout/kl: logged and recomputed are equal in 12 steps, mean 6.5 nats"


def test_ratios_that_are_all_one_are_a_sentence():
    ones = Histogram(-40, 0, (99,))
    alone = figure_of("ratio", ratio(log_ratio=ones, gap=None, mean_gap=()))
    assert words_alone(alone) == "on-policy: policy and old log-probs are equal"
    assert title_of(alone) == "All 99 ratios are exactly 1: no token is clipped"
    # A picture of words is as high as its words.
    assert alone.get_figheight() < 2
    (gap,) = figure_of("ratio", ratio(log_ratio=ones)).axes
    assert gap.get_xlabel() == "gap to the sampler, nats"


def test_mismatch_draws_what_was_found():
    slope, bound = Mark("RDO003", "slope 1/T, T = 0.5", 2.0), Mark("RDO004", "bound -ln 0.9", 1.0, offset=0.105)
    data = mismatch(marks=(slope, bound, Mark("RDO002", "the gap rises at step 3", step=3)))
    figure = figure_of("mismatch", data)
    density, steps, positions, lags, *_ = figure.axes
    assert density.get_xlabel() == "trainer's log-prob, nats"
    assert density.get_ylabel() == "sampler's log-prob, nats"
    assert [[list(line.get_xdata()), list(line.get_ydata())] for line in density.lines] == [
        [[-8, 0], [-8, 0]],
        [[-8, 0], [-16, 0]],
        [[-8, 0], [-7.895, 0.105]],
    ]
    # The row of the lowest sampler's log-probs is below, and a cell of nothing is clear.
    drawn = density.images[0]
    assert (drawn.origin, drawn.get_extent()) == ("lower", [-8, 0, -8, 0])
    assert drawn.get_array().filled(0).tolist() == [list(row) for row in GRID]
    assert [line.get_xdata()[0] for line in steps.lines][-1] == 3
    assert steps.get_ylabel() == "|gap|, nats (log)"
    assert positions.get_xlabel() == "position in the response (log)"
    assert lags.get_xlabel() == "versions behind the newest of the step"
    words = "Sampler against trainer on 560 tokens: per-step median |gap| 0.01 to 0.05 nats; slope 1/T"
    assert title_of(figure).startswith(words)
    without = figure_of("mismatch", mismatch(by_lag=()))
    assert "versions behind the newest of the step" not in {ax.get_xlabel() for ax in without.axes}


def test_lengths_show_how_rows_end():
    figure = figure_of("lengths", lengths(middle=50, truncated_rows=17, ended_rows=17))
    spread, series, ends = figure.axes
    assert spread.get_xlabel() == "response length, tokens"
    assert series.get_ylabel() == "length, tokens"
    assert ends.get_ylabel() == "responses, %"
    assert legend_of(figure) == [
        f"all ({SOME.total})",
        f"truncated ({MOVED.total})",
        "10 % to 90 %",
        "longest",
        "median",
        "truncated",
        "end with an end token",
    ]
    assert title_of(figure) == ("34 responses, median 50 tokens; 17 (50 %) truncated; 17 (50 %) end with an end token")
    alone = figure_of("lengths", lengths(by_status=False, truncated_lengths=None, ended=(), end_tokens=()))
    assert "as long as the longest" in legend_of(alone)
    assert "no column status" in alone.get_supxlabel()


def test_gradient_title_weighs_steps_by_their_gradient():
    data = gradient(2, whole=(99.0, 1.0), spurious=(0.0, 1.0))
    assert (
        PICTURES["gradient"].title(data) == "zero-std:loss changes 1 % of the gradient; 100 % or more in 1 of 2 steps"
    )


def test_gradient_that_no_fix_changes_is_one_panel_with_ticks():
    figure = figure_of("gradient", gradient(spurious=(0.0,) * 12, policy=(3.0,) * 6 + (7.0,) * 6, kl=(0.0,) * 12))
    (parts,) = figure.axes
    figure.canvas.draw()
    low, high = parts.get_ylim()
    assert len([tick for tick in parts.get_yticks() if low <= tick <= high]) > 0
    assert "cosine" not in note_of(figure)


def test_lengths_say_none_and_all():
    told = title_of(figure_of("lengths", lengths(middle=50, truncated_rows=0, ended_rows=34)))
    assert told == "34 responses, median 50 tokens; none truncated; all end with an end token"


def test_ratio_draws_the_clip_range_and_the_gap():
    figure = figure_of("ratio", ratio())
    left, right, below = figure.axes
    assert left.get_xlabel() == "importance ratio (log scale)"
    assert right.get_xlabel() == "gap to the sampler, nats"
    assert below.get_ylabel() == "tokens outside, %"
    limits = [line.get_xdata()[0] for line in left.lines]
    assert limits == [math.log(0.8), math.log(1.28), 0]
    fixed = ratio(fix="zero-std:pr5640", log_ratio_after=Histogram(-2, 0, (3,)), outside_after=(0.25,) * 12)
    figure = figure_of("ratio", fixed)
    assert sum(heights(figure.axes[0], 1)) == 3
    assert legend_of(figure) == ["with zero-std:pr5640", "as configured"]
    assert figure.axes[2].lines[0].get_ydata()[0] == 25
    assert figure.axes[2].lines[1].get_ydata()[5] == 100 * (fixed.below[5] + fixed.above[5])
    assert figure.get_suptitle() == "zero-std:pr5640 leaves 3 of 34 importance ratios in the policy loss"
    assert "no gap to the sampler" in note_of(figure_of("ratio", ratio(gap=None)))


def test_very_large_numbers_stand_at_every_tick():
    """Matplotlib would write a factor into the corner, where the legend is."""
    figure = figure_of("kl", kl(recomputed=(2e16,) * 12, logged=(1e16,) * 12, inverted=(NAN,) * 12))
    figure.draw_without_rendering()
    ax = figure.axes[0]
    assert ax.yaxis.get_offset_text().get_text() == ""
    assert "2e+16" in [label.get_text() for label in ax.get_yticklabels()]


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("span", [0, 1, 3.0, 12.0, 60.0, 300.0])
def test_ratios_stand_at_round_ticks(span):
    wide = Histogram(-40, 0, (1,)) + Histogram(0, round(span), (1,)) + Histogram(0, -round(span), (1,))
    figure = figure_of("ratio", ratio(log_ratio=wide))
    figure.draw_without_rendering()
    ax = figure.axes[0]
    low, high = ax.get_xlim()
    ticks = [math.exp(tick) for tick in ax.get_xticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 9
    assert all(float(f"{tick:.3g}") == pytest.approx(tick) for tick in ticks)


def test_an_overview_says_the_first_finding_of_the_report_in_words():
    data = overview()
    vital = replace(data.vitals[0], marks=((3, "RDT006"), (5, "RDT003")))
    said = {"RDT003": "entropy collapsed at step 5: from 1.5 to 0 nats", "RDT006": "all are truncated from step 3 on"}
    title = PICTURES["overview"].title(replace(data, vitals=(vital,), headlines=said))
    assert title.startswith("Entropy collapsed at step 5, and 1 more finding; logged over ")


def test_a_panel_says_what_begins_there_and_not_the_name_of_the_rule():
    """RDT003 is called entropy-collapse, also where the entropy rises."""
    data = overview()
    vital = replace(data.vitals[0], marks=((5, "RDT003"),))
    said = {"RDT003": "the entropy rose from 1.2 to 1.9 nats, while the reward went from 0.6 to 0.4"}
    figure = figure_of("overview", replace(data, vitals=(vital,), headlines=said))
    title = " ".join(figure.axes[0].get_title(loc="left").split())
    assert title.endswith("The entropy rose from 1.2 to 1.9 nats, from step 5")
    assert "collapse" not in title


def test_an_odd_panel_stands_close_below_the_last_row():
    last, lone = figure_of("overview", overview()).axes[1:3]
    assert (last.get_xlabel(), lone.get_xlabel()) == ("", "optimizer step")
    assert last.xaxis.get_tick_params()["labelbottom"]


def test_values_that_agree_have_another_colour_than_those_that_do_not():
    ax = figure_of("audit", audit()).axes[0]
    colours = {line.get_marker(): line.get_color() for line in ax.lines if len(line.get_xdata()) == 1}
    assert colours["o"] == DARK
    assert colours["s"] == ALARM
