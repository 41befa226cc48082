"""The tokens of a row: colours by sign and size, numbers in words, and nothing that a model wrote is markup."""

import re
from dataclasses import replace

import pytest
from views.test_html import a_page, read, render

from rolloutdoctor.results.row_views import RowView
from rolloutdoctor.views.token_strip import HEAD, TAIL, long_text, strip

NAN = float("nan")
ROW = RowView(
    3,
    "train",
    "3/0/1",
    "3/0",
    "the largest gradient of the run",
    1.0,
    0.5,
    "1+1=",
    "2",
    (4, 5),
    0,
    4,
    (11, 12, 13, 14),
    (True, True, False, True),
    (0.4, -0.2, 0.0, -0.01),
    (0.1, NAN, -0.4, 0.2),
    1.0,
)


def looks(row):
    return [token.look for token in strip(row).tokens]


def test_colour_is_the_gradient_and_the_line_the_gap():
    # Down the gradient: a positive derivative makes a token less likely.
    assert looks(ROW) == ["c4n u1", "c2p", "u4 masked", "u2"]
    found = strip(ROW)
    assert [token.shown for token in found.tokens] == ["11", "12", "13", "14"]
    assert found.tokens[0].words == "place 0, gradient 0.4, gap 0.1 nats"
    assert (found.head, found.heaviest[0]) == (("place", "id", "gradient", "gap, nats"), ("0", "11", "0.4", "0.1"))
    assert "gradient" in found.color
    assert "log-prob" in found.line


def test_without_a_gradient_the_colour_is_the_gap():
    for none in ((), (0.0,) * 4):
        row = replace(ROW, gradient=none)
        assert looks(row) == ["c1p", "", "c4n masked", "c2p"]
        assert strip(row).color == "the trainer's log-prob minus the sampler's"
        assert strip(row).line == ""


def test_without_ids_tokens_are_told_by_place_and_without_values_there_is_no_colour():
    assert [token.shown for token in strip(replace(ROW, ids=(), first=7)).tokens] == ["#7", "#8", "#9", "#10"]
    bare = replace(ROW, gradient=(), gap=(), trained=())
    assert looks(bare) == [""] * 4
    assert (strip(bare).color, strip(bare).heaviest) == ("", ())


def test_what_there_is_not_is_not_on_the_page():
    only_ids = replace(ROW, prompt=None, response=None, gradient=(), gap=())
    words = " ".join(" ".join(read(a_page(rows=[only_ids])).words).split())
    assert "Prompt, token ids: 4 5" in words
    assert "Response:" not in words
    assert "by id" in words
    assert "Colour" not in words
    only_text = RowView(3, "train", "a", None, "RDA001", prompt="1+1=", response="2")
    words = " ".join(" ".join(read(a_page(rows=[only_text])).words).split())
    assert "Prompt: 1+1= Response: 2" in words
    assert "Tokens of the response" not in words
    assert "No row can be shown" in render(a_page())


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    "text",
    [
        "</pre><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "\x1b[31mred\x1b[0m\x00\x08\x9b",
        "\u202eright to left\u2066\u200f",
        "\ud800 alone",
        "<!-- {{ 7 * 7 }} {% raw %} &lt;b&gt;",
        "\u2028\u2029\r\n\ttabs",
    ],
)
def test_a_hostile_text_is_text(text):
    calm = read(a_page(rows=[ROW]))
    row = replace(ROW, prompt=text, response=text, sample_id=text, group_id=text, why=text)
    hostile = read(a_page(rows=[row]))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in calm.tags]
    assert [sorted(attrs) for _, attrs in hostile.tags] == [sorted(attrs) for _, attrs in calm.tags]
    page = render(a_page(rows=[row]))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800]", page)
    page.encode()


def test_a_long_text_is_cut_in_its_middle_and_says_so():
    text = "a" * 50_000 + "b" * 50_000
    shown = str(long_text(text))
    assert shown.startswith("a" * HEAD + "\n... 97,000 characters left out ...\n")
    assert shown.endswith("b" * TAIL)
    assert str(long_text("<a>\nb")) == "&lt;a&gt;\nb"
    many = replace(ROW, prompt=text, response=text, why="y" * 100_000)
    assert len(render(a_page(rows=[many] * 4))) < len(render(a_page())) + 60_000
