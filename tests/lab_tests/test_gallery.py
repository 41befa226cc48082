"""Broken trainings of docs/gallery.md: the report begins with the sentence on the page, also when they are made again.

``UPDATE=1`` rewrites the sentences of recorded runs; ``make gallery`` the kept logs and the pictures, too.
"""

import os

import pytest

pytest.importorskip("trl")

import gallery

pytestmark = pytest.mark.filterwarnings("ignore")
LOGS = [one for one in gallery.BROKEN if one.given == gallery.LOG]
RUNS = [one for one in gallery.BROKEN if one.given != gallery.LOG]


def shown(one):
    return gallery.sections_of(gallery.PAGE.read_text(encoding="utf-8"))[one.title]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("one", LOGS, ids=[one.name for one in LOGS])
def test_the_report_of_a_kept_log_is_the_one_of_the_page(one):
    code, sentence = gallery.first_sentence(gallery.kept(one))
    assert code == one.codes[0]
    assert sentence == shown(one)


@pytest.mark.slow(every=True)
@pytest.mark.parity
@pytest.mark.parametrize("one", LOGS, ids=[one.name for one in LOGS])
def test_a_training_made_again_has_the_fault(one, tmp_path):
    assert gallery.first_sentence(one.make(tmp_path))[0] in one.codes


@pytest.mark.slow(every=True)
@pytest.mark.parity
@pytest.mark.parametrize("one", RUNS, ids=[one.name for one in RUNS])
def test_the_report_begins_as_the_page_says(one, tmp_path):
    code, sentence = gallery.first_sentence(one.make(tmp_path))
    assert code == one.codes[0]
    text = shown(one)
    if os.environ.get("UPDATE") and gallery.without_digits(sentence) != gallery.without_digits(text):
        page = gallery.PAGE.read_text(encoding="utf-8")
        gallery.PAGE.write_text(page.replace(text, sentence), encoding="utf-8")
        text = sentence
    assert gallery.without_digits(sentence) == gallery.without_digits(text)


def test_the_page_has_every_training_with_a_picture():
    assert [*gallery.sections_of(gallery.PAGE.read_text(encoding="utf-8"))] == [one.title for one in gallery.BROKEN]
    assert {path.stem for path in gallery.IMAGES.iterdir()} == {one.name for one in gallery.BROKEN}
