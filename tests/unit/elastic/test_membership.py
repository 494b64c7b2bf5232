"""A membership beside a store: what it notices of the other members."""

from __future__ import annotations

import time

import torch.distributed as dist

from paceline.elastic.member import Member
from paceline.elastic.member_events import Abort, FormWorld, Stopped
from paceline.elastic.membership import Membership
from paceline.elastic.next_view import first_view
from paceline.elastic.store_link import StoreLink
from paceline.elastic.view import Rules

SILENCE = 60.0  # longer than the test


def open_membership(store, me, members):
    member = Member.starting(me, Rules("replicated"), first_view(members))
    return Membership(StoreLink(store), member, lost=SILENCE, wait=SILENCE, on_abort=lambda: None)


def test_a_member_whose_host_is_lost_is_not_waited_for():
    store = dist.HashStore()
    membership = open_membership(store, "a/0/0", ["a/0/0", "b/0/0"])
    membership.start()
    try:
        store.set("elastic/alive/b/0/0", b"1")
        store.set("elastic/lost/b/0/0", b"")
        began = time.monotonic()
        assert isinstance(membership.next_action(), Abort)
        membership.stopped(Stopped(3, "computing", False, None))
        action = membership.next_action()
        while isinstance(action, Abort):
            action = membership.next_action()
        assert isinstance(action, FormWorld)
        assert (action.view.members, action.view.removed[0].cause) == (("a/0/0",), "unreachable")
        assert time.monotonic() - began < SILENCE
    finally:
        membership.close()
