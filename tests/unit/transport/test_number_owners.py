"""Worker numbers belong to the keys that used them first."""

from __future__ import annotations

import resource

from paceline._core.file_limit import raise_file_limit
from paceline.transport.zmq.number_owners import NumberOwners


def test_a_key_that_uses_many_numbers_releases_its_own_only():
    owners = NumberOwners(limit=3)
    owners.claim(1, "alice")
    for number in range(2, 7):
        assert owners.claim(number, "eve") == "eve"
    assert owners.claim(1, "eve") == "alice"
    assert [owners.claim(number, "bob") for number in range(2, 7)] == ["bob", "bob", "eve", "eve", "eve"]


def test_the_number_that_a_key_used_longest_ago_is_released():
    owners = NumberOwners(limit=2)
    for number in (1, 2, 1, 3):
        owners.claim(number, "alice")
    assert [owners.claim(number, "bob") for number in (1, 2, 3)] == ["alice", "bob", "alice"]


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch):
    limits = {"now": (100, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert raise_file_limit(50) == 100, "never lowered"
    assert raise_file_limit(500) == 500
    assert raise_file_limit(5000) == 1000
    limits["now"] = (100, resource.RLIM_INFINITY)
    assert raise_file_limit(5000) == 5000
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raise_file_limit(5000) == 5000
