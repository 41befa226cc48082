"""The page: well-formed, self-contained, readable without sight, and nothing that a model wrote is markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from views.test_formats import HOSTILE, a_report

from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.figures import Gallery, GradientData
from rolloutdoctor.results.findings import InputSummary, Report, Setting, Skipped
from rolloutdoctor.views.html import Drawing, Page, render
from rolloutdoctor.views.links import picture_of, top_picture
from rolloutdoctor.views.step_tables import MOST_COLUMNS, MOST_STEPS, step_table

VOID = {"meta", "br", "wbr", "path", "use", "rect", "line", "img", "link", "input", "hr"}
SVG = '<svg role="img" aria-label="words" viewBox="0 0 1 1"><path d="M 0 0"/></svg>'
BOOK = {"RDA001": "Rows without a trained token.\n\n## What it does\nFinds `rows` & such.\n\n## Example\n>>> 1\n1"}


def a_page(text="g7", **changes):
    steps = tuple(range(3))
    one = (1.0, 0.5, float("nan"))
    gallery = Gallery({"gradient": GradientData("zero-std:loss", steps, one, one, one, one, one)}, {"kl": "no KL term"})
    page = Page(text, a_report(text), [Drawing("gradient", "It <moves>", "in log-prob space", SVG)], gallery, BOOK)
    return replace(page, **changes)


@pytest.mark.parametrize("svg", [SVG, None])
def test_a_picture_of_nothing_is_a_line_of_words(svg):
    report = replace(a_report("g7"), skipped=(), not_applicable=())
    page = a_page(drawings=[Drawing("baseline", "No <group> moves", "nothing drifts", svg)], report=report)
    page = replace(page, gallery=Gallery({}, {}))
    tags = [(tag, attrs.get("id")) for tag, attrs in read(page).tags if attrs.get("id") == "picture-baseline"]
    assert tags == [("p" if svg is None else "figure", "picture-baseline")]
    found = render(page)
    assert ("<svg" in found) == (svg is not None)
    words = "No &lt;group&gt; moves: nothing drifts. There is no picture of baseline to draw."
    assert (words in found) == (svg is None)
    assert ("Every rule was tested, and every picture was drawn." in found) == (svg is not None)
    assert "Every rule was tested" in found


class Reader(HTMLParser):
    """Holds the tags in their order, and fails where they do not nest."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"an attribute is there twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def read(page):
    reader = Reader()
    reader.feed(render(page))
    reader.close()
    assert reader.open == []
    return reader


def attributes(reader, name):
    return [(tag, attrs[name]) for tag, attrs in reader.tags if name in attrs]


@pytest.mark.parametrize(
    "page",
    [
        a_page(),
        a_page(HOSTILE),
        a_page(report=Report("0.1.0", "cpu", "float32", InputSummary()), drawings=[], gallery=Gallery({}, {})),
    ],
)
def test_the_page_is_well_formed_and_needs_nothing_else(page):
    reader = read(page)
    tags = [tag for tag, _ in reader.tags]
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(tags)
    for wanted in ("header", "nav", "main", "footer", "h1", "title"):
        assert tags.count(wanted) == 1, wanted
    assert not any(name.startswith("on") for _, attrs in reader.tags for name in attrs)
    assert attributes(reader, "src") == []
    for tag, address in attributes(reader, "href"):
        assert address.startswith("#") or (tag == "a" and address.startswith("https://"))
    style = render(page).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_every_target_is_there_once_and_every_link_inside_has_its_target():
    reader = read(a_page())
    ids = [name for _, name in attributes(reader, "id")]
    assert len(ids) == len(set(ids))
    for _, address in attributes(reader, "href"):
        assert not address.startswith("#") or address[1:] in ids
    for _, name in attributes(reader, "aria-labelledby"):
        assert name in ids


def test_headings_do_not_skip_a_level_and_tables_have_heads():
    reader = read(a_page())
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("table") == tags.count("caption") == tags.count("thead")
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in reader.tags if tag == "th")
    assert all("aria-label" in attrs for _, attrs in reader.tags if attrs.get("role") in ("img", "region"))
    assert all("aria-label" in attrs for _, attrs in reader.tags if attrs.get("tabindex") == "0")
    assert ("html", {"lang": "en"}) in reader.tags


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    "text",
    [
        HOSTILE,
        "<img src=x onerror=alert(1)>",
        '"><svg onload=alert(1)>',
        "</title></style></script><script>alert(1)</script>",
        "<!-- --><!DOCTYPE x>&lt;b&gt;",
        "\x1b[31mred\x1b[0m\x00\x08\x9b",
        "javascript:alert(1)",
    ],
)
def test_what_a_model_wrote_is_text(text):
    calm, hostile = read(a_page()), read(a_page(text))
    # The same tags with the same attributes, but for the words.
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in calm.tags]
    assert [sorted(attrs) for _, attrs in hostile.tags] == [sorted(attrs) for _, attrs in calm.tags]
    page = render(a_page(text))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    visible = "".join(hostile.words)
    if text.startswith("<img"):
        assert "group <img src=x onerror=alert(1)> row" in visible


def test_every_text_of_a_report_is_escaped():
    report = a_report()
    evil = "<b>evil</b>"
    found = replace(
        report.findings[0], headline=evil, message=evil, evidence=evil, advice=evil, references=(evil, "javascript:x")
    )
    skipped = replace(report.skipped[0], reason=evil, remedy=evil)
    config = {evil: Setting(evil, evil), "assumed": Setting(evil, evil, assumed=True)}
    report = replace(report, findings=(found,), skipped=(skipped,), config=config, notes=(evil,), trainer=evil)
    page = a_page(evil, report=report, gallery=Gallery({}, {"kl": evil}), definitions={"RDA001": f"{evil}\n\n{evil}"})
    page = replace(page, drawings=[Drawing("kl", evil, evil, SVG)])
    text = render(page)
    assert "<b>" not in text
    assert text.count("&lt;b&gt;evil&lt;/b&gt;") > 15
    assert "javascript:x" not in text


def test_the_page_says_what_there_is_to_say():
    words = " ".join(" ".join(read(a_page()).words).split())
    for part in (
        "4 of 6 rules tested: 2 found (1 error, 1 info), 2 clean; 1 not applicable, 1 skipped;",
        "Fully masked responses shift 3 advantages, by 0.5 on average and 49.5 at most. To fix it: leave them out",
        "Not applicable: use_kl_loss = false: there is no KL term in the loss.",
        "error: fully masked responses shift 3 advantages, by 0.5 on average and 49.5 at most",
        "RDA001 rejected-in-baseline, confirmed",
        "step 3 group g7 row g7: advantage -49.5, with unmasked rows only 1",
        "command line",
        "assumed: newest verl known here",
        "RDM001 kl-metric-corrupted Skipped: missing column kl. To run it: record it.",
        "Picture: kl no KL term.",
        "RDA001: Rows without a trained token. What it does Finds rows & such.",
        "It <moves>",
        "1,234 rows in 77 groups, 5 steps, 123,456 tokens",
        "not proof that the run is broken",
    ):
        assert part in words, part
    assert ">>>" not in words


def test_long_tables_are_cut_and_say_so():
    steps = tuple(range(10_000))
    some = tuple(1.0 + step for step in steps)
    page = a_page(gallery=Gallery({"gradient": GradientData(None, steps, some, some, some, some, some)}, {}))
    rows = tuple({"step": step, "split": "train", "loss": 0.1 + step} for step in steps)
    page = replace(page, report=replace(page.report, findings=(replace(page.report.findings[0], per_step=rows),)))
    text = render(page)
    assert text.count(f"All 10,000 steps. Here are the first {MOST_STEPS}; --steps START:STOP shows others.") == 2
    assert text.count("<tr>") < 2 * MOST_STEPS + 30
    assert len(text) < 100_000


def test_a_table_of_steps_holds_what_says_something():
    nan = float("nan")
    rows = [
        {"step": 1, "split": "train", "same": 8, "flips": 0, "kappa": 1.0},
        {"step": 2, "split": "train", "same": 8, "flips": 3, "kappa": 0.5},
        {"step": 3, "split": "train", "same": 8, "flips": None, "kappa": 1.0},
        {"step": 4, "split": "train", "same": 8, "flips": nan, "kappa": 1.0},
    ]
    found = step_table(rows)
    assert (found.head, [row["step"] for row in found.rows]) == (("step", "flips", "kappa"), [2])
    assert found.notes == (
        "1 of 4 steps: in the others flips is 0 or not defined.",
        "The same in every step: same 8.",
    )
    assert step_table([rows[0], rows[2] | {"flips": 0}]) is None
    assert step_table([]) is None
    assert "split" in step_table([rows[1], rows[1] | {"split": "eval", "flips": 4}]).head
    wide = [{"step": step} | {f"m{name}": step + name for name in range(20)} for step in (1, 2)]
    found = step_table(wide)
    assert len(found.head) == MOST_COLUMNS + 1
    assert found.notes[-1] == "11 more measures of each step: check --format json."


def test_the_first_screen_links_every_finding_to_what_it_rests_on():
    report = a_report()
    rows = ({"step": 1, "split": "train", "shift": 0.5}, {"step": 2, "split": "train", "shift": 0.7})
    report = replace(report, findings=(replace(report.findings[0], per_step=rows), *report.findings[1:]))
    drawings = [Drawing("advantages", "296 change", "", SVG), Drawing("kl", "equal", "the same", None)]
    reader = read(a_page(report=report, drawings=drawings, lead="advantages"))
    links = [attrs["href"] for tag, attrs in reader.tags if tag == "a" and "href" in attrs]
    top = links[1 : links.index("#audit")]
    assert top[:4] == ["#finding-RDA001", "#picture-advantages", "#steps-RDA001", "#finding-RDG002"]
    ids = [name for _, name in attributes(reader, "id")]
    assert set(top) <= {f"#{name}" for name in ids}
    # The picture is there once, before the sections.
    assert ids.count("picture-advantages") == 1
    assert ids.index("picture-advantages") < ids.index("findings")
    assert "The picture of advantages is at the top" in "".join(reader.words)


def test_the_top_picture_is_that_of_the_worst_fault():
    error = a_report().findings[0]
    report = a_report()
    assert top_picture(report, ["advantages", "gradient"])[0] == "advantages"
    assert top_picture(report, ["gradient"]) is None
    assert picture_of(replace(error, code="RDI001"), ["advantages"]) is None
    cause = Cause("x", "RDC001", "words", "kl", 1, 0, 1, 0.5)
    differs = replace(error, code="RDC001", cause=cause)
    assert picture_of(differs, ["kl", "audit"]) == "kl"
    assert picture_of(replace(differs, cause=replace(cause, quantity="advantages")), ["kl", "audit"]) == "audit"


def test_the_top_picture_of_a_healthy_run_is_what_was_logged():
    report = replace(a_report(), findings=a_report().findings[1:])
    assert top_picture(report, ["overview", "audit", "kl"]) == ("overview", None)
    assert top_picture(report, ["audit", "kl"]) == ("audit", None)
    assert top_picture(a_report(), ["overview", "audit"]) is None


def test_defaults_are_folded_and_what_is_stated_or_assumed_is_not():
    text = render(a_page()).replace("options at the trainer", "option at the trainer")
    shown, _, folded = text.partition(" option at the trainer's default")
    assert "<code>algorithm.adv_<wbr>estimator</code>" in shown
    assert "assumed: newest verl known here" in shown
    assert "assumed: default of verl 0.9.1" in shown
    assert "<code>actor_<wbr>rollout_<wbr>ref.rollout.n</code>" in folded
    assert shown.endswith("<details><summary>1")


def test_rules_that_lack_the_same_are_named_together():
    one = Skipped("RDM001", "kl-metric-corrupted", "missing column kl", "record it")
    other = replace(one, code="RDO001", name="sampler-gap")
    alone = Skipped("RDA001", "rejected-in-baseline", "no mask", "record that")
    words = " ".join(" ".join(read(a_page(report=replace(a_report(), skipped=(alone, one, other)))).words).split())
    both = "RDM001 kl-metric-corrupted, RDO001 sampler-gap Skipped: missing column kl. To run them: record it."
    assert both in words
    assert words.index(both) < words.index("Skipped: no mask. To run it")
    left_out = {"kl": "no trainer", "ratio": "no trainer", "mismatch": "no column"}
    words = " ".join(" ".join(read(a_page(gallery=Gallery({}, left_out))).words).split())
    assert "Picture: kl, ratio no trainer." in words


def test_a_log_alone_has_no_rows_to_count():
    report = replace(a_report(), input=InputSummary(steps=1234), config={})
    text = render(a_page(report=report, drawings=[], gallery=Gallery({}, {"kl": "no trainer", "ratio": "no column"})))
    assert re.findall('<section id="([a-z]+)"', text) == ["findings", "skipped", "definitions"]
    assert "They are of rollouts, and there are logged metrics alone." in text
    assert "no trainer" not in text
    assert "logged metrics of 1,234 steps, no rollouts" in text
    assert "0 rows" not in text


def test_nothing_found_and_nothing_checked_are_told_apart():
    empty = Report("0.1.0", "cpu", "float32", InputSummary())
    calm = render(a_page(report=replace(empty, clean=(("RDI001", "nonfinite-values"),))))
    assert "No findings." in calm
    assert 'class="verdict clean"' in calm
    assert "Nothing was checked." in render(a_page(report=replace(empty, skipped=a_report().skipped)))
