"""``python -m rolloutdoctor``."""

from rolloutdoctor.cli import program

program()
