"""`paceline hub` refuses invalid options by name, before it binds or writes."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exploding", "-1"], "--exploding -1\n  → give a number above 1"),
        (["--exploding", "nan"], "--exploding nan"),
        (["--outer", "adam"], "unknown outer optimizer 'adam'; valid: averaging"),
        (["--strikes", "0"], "strikes=0"),
        (["--shard", "2/2"], "shard 2 of 2"),
        (["--until", "soon"], "'soon' is no time"),
        (["--keys", "nowhere"], "nowhere can't be read"),
    ],
)
def test_invalid_options_are_refused(command, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("hub", "serve", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())
