"""Broken trainings of docs/gallery.md, made again: the report begins with the sentence on the page, but for digits.

``UPDATE=1`` rewrites the sentences; ``make gallery`` the pictures, too.
"""

import os

import pytest

pytest.importorskip("trl")

import gallery

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow(every=True)
@pytest.mark.parity
@pytest.mark.parametrize("one", gallery.BROKEN, ids=[one.name for one in gallery.BROKEN])
def test_the_report_begins_as_the_page_says(one, tmp_path):
    code, sentence = gallery.first_sentence(one.make(tmp_path))
    assert code == one.code
    text = gallery.PAGE.read_text(encoding="utf-8")
    shown = gallery.sections_of(text)[one.title]
    if os.environ.get("UPDATE") and gallery.without_digits(sentence) != gallery.without_digits(shown):
        gallery.PAGE.write_text(text.replace(shown, sentence), encoding="utf-8")
        shown = sentence
    assert gallery.without_digits(sentence) == gallery.without_digits(shown)


def test_the_page_has_every_training_with_a_picture():
    assert [*gallery.sections_of(gallery.PAGE.read_text(encoding="utf-8"))] == [one.title for one in gallery.BROKEN]
    assert {path.stem for path in gallery.IMAGES.iterdir()} == {one.name for one in gallery.BROKEN}
