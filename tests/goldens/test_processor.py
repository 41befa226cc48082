"""Every file of stored results says whose processor made it, or that nobody noted it."""

import json

import pytest
from goldens.processor import HERE, NOTED, maker, note


def test_every_file_of_results_is_named():
    files = [*HERE.glob("data/*.*"), *HERE.glob("data/*/expected_*.parquet"), *HERE.glob("real/*/expected*.parquet")]
    assert json.loads(NOTED.read_text()).keys() == {path.relative_to(HERE).as_posix() for path in files}


@pytest.mark.parametrize("script", [*sorted(HERE.glob("make_*.py")), HERE / "real" / "make" / "store.py"])
def test_every_script_that_stores_results_notes_it(script):
    text = script.read_text()
    assert "goldens.processor import note" in text or "make_trl_releases import store" in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t: 167\n", "GenuineIntel"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "0x41"),
    ],
)
def test_the_maker_is_read(tmp_path, text, wanted):
    (tmp_path / "cpuinfo").write_text(text)
    assert maker(tmp_path / "cpuinfo") == wanted
    assert maker(tmp_path / "none")


def test_a_file_is_noted_beside_the_others(tmp_path):
    noted = tmp_path / "processors.json"
    noted.write_text('{"data/b.npz": null}')
    note(tmp_path / "data" / "a.npz", noted)
    assert json.loads(noted.read_text()) == {"data/a.npz": maker(), "data/b.npz": None}
