import os
import sys
from types import SimpleNamespace

import pytest

from rolloutdoctor.cli import main


@pytest.fixture
def rolloutdoctor(capsys, monkeypatch):
    """Run the command line in this process: what it prints, and its exit code."""
    for name in list(os.environ):
        if name.startswith("ROLLOUTDOCTOR") or name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")

    def invoke(*words, env=None, cwd=None):
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            patch.setattr(sys, "argv", ["rolloutdoctor", *map(str, words)])
            capsys.readouterr()
            with pytest.raises(SystemExit) as stop:
                main()
            printed = capsys.readouterr()
        return SimpleNamespace(returncode=stop.value.code or 0, stdout=printed.out, stderr=printed.err)

    return invoke
