"""Every format of a comparison, compared with a stored rendering. ``UPDATE=1`` rewrites the stored ones."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutdoctor.commands.diff import words
from rolloutdoctor.commands.diff.formats import RENDERERS
from rolloutdoctor.results.comparison import Comparison, Effect, MovedGroup, MovedRow, Pair, Slice
from rolloutdoctor.results.findings import InputSummary, Measure, Setting
from rolloutdoctor.views.style import Style

STORED = Path(__file__).parent / "stored"

HOSTILE = "\x1b[2J[bold]x[/]\u202e<script>alert(1)</script>|`a`\nnext line"


def numbers(**changed):
    found = {
        "rows": (8, "rows"), "unmasked_rows": (7, "rows"), "groups": (2, "groups"),
        "changed_rows": (3, "rows"), "changed_groups": (1, "groups"), "undefined_rows": (0, "rows"),
        "advantage_shift_mean": (0.1 + 0.2, "advantage"), "advantage_shift_max": (49.5, "advantage"),
        "sign_flips": (1, "rows"), "drifted_rows": (3, "rows"),
        "baseline_drift_mean": (0.25, "reward"), "baseline_drift_max": (0.5, "reward"),
        "loss_before": (0.0, "loss"), "loss_after": (0.125, "loss"),
        "policy_loss_before": (-0.5, "loss"), "policy_loss_after": (-0.25, "loss"),
        "kl_loss_before": (0.25, "loss"), "kl_loss_after": (0.25, "loss"),
        "kl_before": (0.0625, "nats"), "kl_after": (0.0625, "nats"),
        "grad_l1_before": (12.5, "1"), "grad_l1_after": (10.0, "1"),
        "grad_l2_before": (2.5, "1"), "grad_l2_after": (math.nan, "1"),
        "spurious_share_l1": (0.0123456, "share"), "relative_change_l1": (0.0154321, "share"),
        "kappa": (1.0625, "1"), "cosine": (None, "1"),
        "other_rows": (4, "rows"), "other_rows_rescaled": (4, "rows"), "other_rows_scale": (1.25, "1"),
        "weight_ratio_mean": (1.25, "1"), "weight_ratio_min": (1.0, "1"), "weight_ratio_max": (1.5, "1"),
    }  # fmt: skip
    return {name: Measure(value, unit) for name, (value, unit) in (found | changed).items()}


def a_comparison(text="g7", effects=2) -> Comparison:
    main = Effect(
        label="zero-std:renormalised + rejected-rows:singleton-raw",
        joint=effects > 1,
        differs=True,
        total=numbers(),
        metrics={"kl": Pair(0.5, 0.5), "loss": Pair(0.0, 0.125), "reward": Pair(0.75, None)},
        per_step=(Slice({"step": 3, "split": "train"}, numbers(), {"kl": Pair(0.5, math.inf)}),),
        parts=(Slice({"reward": "0"}, numbers()), Slice({"reward": "0.5 to 1"}, numbers(kappa=(None, "1")))),
        groups=(
            MovedGroup(
                3, "train", text, 0.375, 9,
                (
                    MovedRow(text, 1.0, Pair(0.5, -0.25), text, text),
                    MovedRow("r2", None, Pair(math.nan, None), text, "short"),
                ),
            ),
        ),
        moved_by="absolute change of the log-prob gradient",
        remarks=("the denominators change, and with them everyone's learning rate: 4 of 4 rows",),
    )  # fmt: skip
    alone = replace(
        main, label="zero-std:renormalised", joint=False, differs=False, parts=(), groups=(), remarks=("nothing",)
    )
    return Comparison(
        version="0.1.0",
        device="cpu",
        dtype="float32",
        input=InputSummary(rows=8, steps=1, groups=2, tokens=123),
        trainer="trl",
        trainer_version="1.16.0",
        config={"version": Setting("1.16.0", "file metadata"), "beta": Setting(0.04, "command line")},
        by="reward",
        effects=(main, alone)[:effects],
        notes=("one step has no rows",),
    )


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("full", Style(width=100)),
        ("full-narrow-ascii", Style(width=60, unicode=False)),
        ("concise", Style()),
        ("json", Style()),
        ("jsonl", Style()),
        ("markdown", Style()),
    ],
)
def test_a_comparison_looks_as_stored(name, style):
    text = RENDERERS[name.partition("-")[0]](a_comparison(), style)
    stored = STORED / f"diff-{name}.txt"
    if os.environ.get("UPDATE"):
        stored.write_text(text, encoding="utf-8")
    assert text == stored.read_text(encoding="utf-8")


def test_json_never_rounds_and_has_a_word_for_nothing():
    (main, alone) = json.loads(RENDERERS["json"](a_comparison(), Style()))["effects"]
    assert main["total"]["advantage_shift_mean"] == {"value": 0.30000000000000004, "unit": "advantage"}
    assert main["total"]["cosine"]["value"] is main["total"]["grad_l2_after"]["value"] is None
    assert main["per_step"][0]["metrics"] == {"kl": {"before": 0.5, "after": None}}
    assert main["groups"][0]["moved_most"][1]["advantage_before"] is None
    assert (main["joint"], alone["joint"]) == (True, False)


@pytest.mark.parametrize("name", ["full", "concise", "markdown"])
def test_text_from_a_file_cannot_draw(name):
    text = RENDERERS[name](a_comparison(HOSTILE), Style(width=120))
    assert "\u202e" not in text
    assert "\x1b" not in text
    if name == "markdown":
        assert "<script>" not in text
        assert "\n" + "next line" not in text
        assert "| \\\\x1b\\[2J\\[bold\\]x" in text
        assert not re.search(r"(?<!\\)`a", text)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_asked(width):
    for text in ("g7", HOSTILE, "very long " * 40):
        rendered = RENDERERS["full"](a_comparison(text), Style(width=width))
        assert max(map(len, rendered.splitlines())) <= width


def test_ascii_where_the_terminal_has_no_more():
    for name in ("full", "concise", "json", "jsonl", "markdown"):
        assert RENDERERS[name](a_comparison("π"), Style(unicode=False)).isascii()


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.124, "+0.124"), (0.126, "+100 %"), (-0.124, "-0.124"), (-0.126, "-100 %")]
)
def test_a_share_of_a_loss_near_0_is_not_said(loss, shown):
    """A hundredth of the gradient of a step, 12.5, is 0.125."""
    effect = a_comparison().effects[0]
    changed = {"loss_before": (loss, "loss"), "loss_after": (2 * loss, "loss")}
    near = replace(effect, total=numbers(**changed), metrics={name: Pair(loss, 2 * loss) for name in LOSSES})
    assert [line[3] for line in words.sides(near) if line[0] == "loss"] == [shown]
    assert {line[0]: line[3] for line in words.moved_metrics(near)} == {
        "actor/pg_loss": shown,
        "kl_loss": "+100 %" if loss > 0 else "-100 %",
    }
    assert words.every_lines(replace(a_comparison(), effects=(near,)))[0][5] == shown


@pytest.mark.parametrize(("mean", "shown"), [(0.0199, "+0.0199"), (0.0201, "+100 %")])
def test_a_share_of_a_mean_near_0_is_not_said(mean, shown):
    """A hundredth of the largest value, -2, is 0.02."""
    ends = {"a/min": Pair(-2.0, -2.0), "a/max": Pair(1.0, None)}
    effect = replace(a_comparison().effects[0], metrics={"a/mean": Pair(mean, 2 * mean), **ends})
    assert words.moved_metrics(effect)[0][3] == shown


LOSSES = ("actor/pg_loss", "kl_loss")


@pytest.mark.parametrize("kl", [0.0, 0.0625])
def test_a_kl_that_is_in_no_loss_has_no_line(kl):
    effect = a_comparison().effects[0]
    names = ("kl_before", "kl_after", "kl_loss_before", "kl_loss_after")
    found = words.sides(replace(effect, total=numbers(**dict.fromkeys(names, (kl, "nats")))))
    assert [line[0] for line in found if "KL" in line[0]] == ["KL loss", "KL of the loss, per token"] * bool(kl)


def test_one_effect_needs_no_table_of_effects():
    for name in ("full", "markdown"):
        assert "together" in RENDERERS[name](a_comparison(), Style())
        assert "together" not in RENDERERS[name](a_comparison(effects=1), Style())
