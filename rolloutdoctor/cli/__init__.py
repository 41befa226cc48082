"""The command line: parse, call, render, exit. The only place that prints."""

from rolloutdoctor.cli.app import main

__all__ = ["main"]
