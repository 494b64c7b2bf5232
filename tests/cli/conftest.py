"""Runs the command line in the process of the test; fixtures of places for checkpoints, see place_fixtures.py."""

from __future__ import annotations

import sys

import pytest

from paceline.tools.cli.app import main
from place_fixtures import make_place, s3, sftp_session  # noqa: F401


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``paceline WORDS …`` on a wide terminal without colours; return exit code, stdout and stderr."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        written = capsys.readouterr()
        return code, written.out, written.err

    return run
