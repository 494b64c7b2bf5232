"""What remedies name exists: options of commands, and names of the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from paceline.tools.cli import app
from paceline.tools.report.run import bottleneck

SOURCE = Path(bottleneck.__file__).read_text()
OPTIONS = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", SOURCE)))


def options_of(command):
    found = {option for parameter in command.params for option in parameter.opts}
    for each in getattr(command, "commands", {}).values():
        found |= options_of(each)
    return found


def test_options_in_remedies_are_options_of_commands():
    known = set().union(*(options_of(app._load(name)) for name in ("train", "plan", "bench")))
    assert OPTIONS
    assert set(OPTIONS) <= known


@pytest.mark.parametrize("name", sorted(set(re.findall(r"paceline\.([A-Za-z]\w+)\b(?!\.)", SOURCE))))
def test_a_name_of_the_library_in_a_remedy_exists(name):
    assert hasattr(paceline, name)
