"""One quantity has one number, whichever command tells it: check, diff, the pictures and the page."""

import html
import re
from pathlib import Path

import pytest

import rolloutdoctor as rd
from rolloutdoctor.views.style import shown

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
RUNS = ("verl_rejected", "run", "slime_ppo", "healthy")

SAME = {
    "RDA001": {
        "affected_groups": "changed_groups",
        "live_rows": "changed_rows",
        "sign_flips": "sign_flips",
        "advantage_shift_mean": "advantage_shift_mean",
        "advantage_shift_max": "advantage_shift_max",
        "drifted_rows": "drifted_rows",
        "baseline_drift_mean": "baseline_drift_mean",
        "baseline_drift_max": "baseline_drift_max",
        "spurious_share_l1": "spurious_share_l1",
        "relative_change_l1": "relative_change_l1",
        "kappa": "kappa",
        "cosine": "cosine",
    },
    "RDG001": {
        "grad_share_l1": "spurious_share_l1",
        "relative_change_l1": "relative_change_l1",
        "kappa": "kappa",
        "cosine": "cosine",
    },
}
"""Measures of a rule to those of a diff with its fix."""

FIXES = {"RDA001": "rejected-rows", "RDG001": "zero-std"}


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    """A sample: its path, what a check measures, and what a diff measures of each fix."""
    path = SAMPLES / f"{request.param}.parquet"
    checked = {finding.code: finding for finding in rd.check(path).findings}
    compared = {code: rd.diff(path, fixes=[fix]).effects[0] for code, fix in FIXES.items()}
    return path, checked, compared


@pytest.mark.slow
@pytest.mark.parametrize("code", SAME)
def test_check_and_diff(run, code):
    _, checked, compared = run
    total = compared[code].total
    if code not in checked:
        # What a check does not find a diff does not show.
        assert not total["spurious_share_l1"].value
        return
    for name, other in SAME[code].items():
        assert checked[code].measures[name].value == pytest.approx(total[other].value, rel=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "policy_loss"])
def test_compare_and_diff(name, run):
    """A mean over the steps is the same mean in both."""
    _, _, compared = run
    effect = compared["RDG001"]
    for metric in {"loss": ("loss", "actor/loss", "train/loss"), "policy_loss": ("actor/pg_loss",)}[name]:
        if metric in effect.metrics:
            assert effect.metrics[metric].before == pytest.approx(effect.total[f"{name}_before"].value, rel=1e-6)


@pytest.fixture(scope="module")
def rejected():
    """A sample with rejected rows, and what a diff measures of the fix."""
    path = SAMPLES / "verl_rejected.parquet"
    return path, rd.diff(path, fixes=["rejected-rows"]).effects[0].total


@pytest.mark.slow
def test_verdict_and_diff(rolloutdoctor, rejected):
    """The share of the gradient in the first sentence is that of the diff and of the picture."""
    path, total = rejected
    share = shown(total["spurious_share_l1"])
    said = " ".join(rolloutdoctor("check", path, "-q").stdout.split())
    assert f"; this changes the log-prob gradient by {share}." in said
    found = " ".join(rolloutdoctor("diff", path, "--fix", "rejected-rows").stdout.split())
    assert f"spurious share {share} (L1)" in found


@pytest.mark.slow
def test_page_and_diff(rolloutdoctor, rejected, tmp_path):
    (path, total), page = rejected, tmp_path / "page.html"
    assert not rolloutdoctor("report", path, "--fix", "rejected-rows", "-o", page).returncode
    text = html.unescape(re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8")))
    text = " ".join(text.split())
    value = {name: shown(measure) for name, measure in total.items()}
    told = [
        f"changes {value['spurious_share_l1']} of the gradient",
        f"changes the advantage of {value['changed_rows']} of {value['unmasked_rows']} rows",
        f"{value['sign_flips']} signs flipped",
    ]
    for words in told:
        assert words in text, words
    drift = re.search(r"groups with masked responses drift, by ([\d.e-]+) at most", text)
    assert float(drift[1]) == pytest.approx(total["baseline_drift_max"].value, rel=5e-3)
