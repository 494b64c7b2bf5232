"""The store of an elastic world: keys that are created once, and waits that can be ended."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.elastic.store_link import AbortableStore, StoreLink
from paceline.errors import WorldError


@pytest.fixture
def store():
    return dist.HashStore()


def test_a_key_is_created_once(store):
    link = StoreLink(store)
    assert link.read("view/0") is None
    assert link.create("view/0", b"first") == b"first"
    assert link.create("view/0", b"second") == b"first"
    assert link.read("view/0") == b"first"
    link.write("view/0", b"written")
    assert link.read("view/0") == b"written"


def test_an_abort_ends_a_wait_and_all_later_calls(store):
    abortable = AbortableStore(store, 30)
    threading.Timer(0.05, abortable.abort).start()
    with pytest.raises(WorldError, match="world changed"):
        abortable.get("never")
    for call in (
        lambda: abortable.set("a", b"1"),
        lambda: abortable.check(["a"]),
        lambda: abortable.add("b", 1),
    ):
        with pytest.raises(WorldError):
            call()


def test_a_wait_ends_when_the_key_is_there_or_time_is_up(store):
    abortable = AbortableStore(store, 30)
    threading.Timer(0.05, store.set, ("key", "value")).start()
    assert abortable.get("key") == b"value"
    with pytest.raises(dist.DistStoreError, match="no other within"):
        abortable.wait(["other"], timedelta(seconds=0.05))


def test_process_groups_can_be_formed_with_it(store):
    abortable = AbortableStore(store, 30)
    assert abortable.add("number", 2) == 2
    assert abortable.compare_set("text", "", "mine") == b"mine"
    assert abortable.compare_set("text", "", "yours") == b"mine"
    assert abortable.num_keys() >= 2
    assert abortable.delete_key("text")
