"""Settings that lie beside a log, as commands show them."""

import json

from importers.test_run_settings import BANNER, DICTS, SCRIPT


def test_of_several_files_none_is_used_and_a_note_says_so(tmp_path, rolloutdoctor):
    (tmp_path / "train.log").write_text(DICTS)
    for name in ("a.sh", "b.sh"):
        (tmp_path / name).write_text(
            SCRIPT.replace("train.log", name).replace("1e-6", "2e-6" if name < "b" else "1e-6")
        )
    done = rolloutdoctor("info", tmp_path / "train.log")
    assert "a.sh, b.sh: which of them is of the run is not known; their options are not used" in done.stderr
    assert "settings" not in done.stdout


def test_settings_are_shown(tmp_path, rolloutdoctor):
    (tmp_path / "log.txt").write_text(BANNER + "lr=1e-6, num_generations=4, seed=3\n" + DICTS)
    for command in (["info"], ["check", "-v", "--fail-on", "never"]):
        shown = rolloutdoctor(*command, tmp_path / "log.txt").stdout
        assert "settings" in shown
        assert "seed=3" in shown
    body = json.loads(rolloutdoctor("check", tmp_path / "log.txt", "--format", "json").stdout)
    assert {"name": "seed", "title": "seed", "value": 3, "origin": "printed config in log.txt"} in body["settings"]
