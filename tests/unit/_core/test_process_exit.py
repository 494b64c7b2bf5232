"""Description of how a process ended."""

from __future__ import annotations

import pytest

from paceline._core.processes.process_exit import ExitStatus, describe_exit


@pytest.mark.parametrize(
    ("code", "sentence", "short"),
    [
        (0, "ended with exit code 0", "exit code 0"),
        (3, "ended with exit code 3", "exit code 3"),
        (-9, "was ended by SIGKILL", "ended by SIGKILL"),
        (-40, "was ended by signal 40", "ended by signal 40"),
    ],
)
def test_signals_are_named_where_they_have_names(code, sentence, short):
    assert describe_exit(code) == sentence
    assert str(ExitStatus(code)) == short
