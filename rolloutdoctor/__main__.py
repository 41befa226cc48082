"""``python -m rolloutdoctor``."""

from rolloutdoctor.cli import main

main()
