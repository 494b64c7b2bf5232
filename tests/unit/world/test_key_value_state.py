"""The key-value store of ranks without sockets: torch's semantics, requests that wait, limits."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode

import msgspec
import pytest

from paceline.world.store import key_value_state
from paceline.world.store.connection_limit import ConnectionLimit
from paceline.world.store.key_value_state import KeyValueState


class Store:
    """Requests of one client in the space "s" at chosen times."""

    def __init__(self):
        self.state, self.now, self.id, self.replies = KeyValueState(), 0.0, 0, {}

    def send(self, kind, client=b"a", **fields):
        self.id += 1
        for name in ("value", "expected", "desired"):
            if name in fields:
                fields[name] = b64encode(fields[name]).decode()
        request = {"type": kind, "id": self.id, "space": "s"} | fields
        self.take(self.state.receive(client, msgspec.json.encode(request), self.now))
        return (client, self.id)

    def take(self, replies):
        for client, body in replies:
            reply = msgspec.json.decode(body)
            assert self.replies.setdefault((client, reply["id"]), reply) is reply

    def ask(self, kind, **fields):
        reply = self.replies[self.send(kind, **fields)]
        return reply.get("error") or reply.get("result")

    def set(self, **values):
        return self.ask("set", values={key: b64encode(value).decode() for key, value in values.items()})


def test_values_are_set_compared_added_appended_and_deleted():
    store = Store()
    store.set(a=b"1", b=b"\x00\xff")
    assert [b64decode(one) for one in store.ask("get", keys=["b", "a"], seconds=0)] == [b"\x00\xff", b"1"]
    assert [store.ask("check", keys=keys) for keys in (["a", "b"], ["a", "c"], [])] == [True, False, True]
    assert [store.ask("add", key="n", amount=3), store.ask("add", key="n", amount=-5)] == [3, -2]
    assert store.ask("add", key="a", amount=2**40) == 2**40 + 1
    assert "not a number" in store.ask("add", key="b", amount=1)
    store.ask("append", key="log", value=b"x")
    store.ask("append", key="log", value=b"y")
    assert b64decode(store.ask("get", keys=["log"], seconds=0)[0]) == b"xy"
    cases = [("c", b"", b"1"), ("c", b"2", b"3"), ("c", b"1", b"2"), ("d", b"other", b"1")]
    kept = [b64decode(store.ask("compare", key=key, expected=one, desired=two)) for key, one, two in cases]
    assert kept == [b"1", b"1", b"2", b"other"]
    assert store.ask("check", keys=["d"]) is False
    assert (store.ask("count"), store.ask("delete", key="a"), store.ask("delete", key="a")) == (
        5,
        True,
        False,
    )
    assert store.ask("count") == 4


def test_a_request_waits_for_all_its_keys():
    store = Store()
    both = store.send("get", keys=["a", "b"], seconds=9.0)
    one = store.send("wait", client=b"b", keys=["b"], seconds=5.0)
    store.set(a=b"1")
    assert not {both, one} & store.replies.keys()
    store.set(b=b"2")
    assert "result" not in store.replies[one]
    assert [b64decode(value) for value in store.replies[both]["result"]] == [b"1", b"2"]
    assert store.state.next_due() == math.inf


def test_a_key_that_is_deleted_meanwhile_is_waited_for_again():
    store = Store()
    waiting = store.send("get", keys=["a", "b"], seconds=9.0)
    store.set(a=b"1")
    store.ask("delete", key="a")
    store.set(b=b"2")
    assert waiting not in store.replies
    store.set(a=b"3")
    assert b64decode(store.replies[waiting]["result"][0]) == b"3"


def test_time_runs_out_for_each_request_and_lost_clients_are_forgotten():
    store = Store()
    first = store.send("wait", keys=["a", "b"], seconds=2.0)
    store.send("wait", client=b"gone", keys=["a"], seconds=3.0)
    third = store.send("get", keys=["a"], seconds=4.0)
    store.take(store.state.disconnected(b"gone", 0.0))
    assert store.state.next_due() == 2.0
    store.take(store.state.advance(2.0))
    assert store.replies[first] == {"id": 1, "error": "wait timeout after 2 s, keys: a, b", "timeout": True}
    assert store.state.next_due() == 4.0
    store.set(a=b"1")
    assert [client for client, _ in store.replies] == [b"a"] * 3
    assert store.replies[third]["result"]


def test_invalid_and_excessive_requests_are_refused(monkeypatch):
    store = Store()
    for body in (b"", b"\xff\xfe", b"[]", b'{"type": "eval", "id": 1, "space": ""}', b'{"type": "set"}'):
        [(client, reply)] = store.state.receive(b"c", body, 0.0)
        assert (client, "invalid request" in msgspec.json.decode(reply)["error"]) == (b"c", True)
    assert "invalid request" in store.ask("check", keys=["k" * 5000])
    assert "invalid request" in store.ask("get", keys=["k"], seconds=-1)
    monkeypatch.setattr(key_value_state, "_STORE_NBYTES", 1000)
    store.set(a=b"x" * 700)
    assert "full" in store.set(b=b"y" * 300)
    store.ask("delete", key="a")
    assert store.set(b=b"y" * 300) is None
    store.state.drop_space("s")
    assert store.set(a=b"x" * 700) is None
    monkeypatch.setattr(key_value_state, "_MAX_WAITING", 1)
    store.send("wait", keys=["c"], seconds=1.0)
    assert "too many" in store.ask("wait", keys=["c"], seconds=1.0)


def test_spaces_are_separate():
    store = Store()
    store.set(a=b"1")
    assert store.ask("check", keys=["a"], space="t") is False


def test_callers_of_a_crowded_address_are_dropped_first():
    limit = ConnectionLimit(4)
    assert limit.add(10, "10.0.0.1") is None
    assert [limit.add(fd, "10.0.0.2") for fd in (20, 21, 22)] == [None] * 3
    assert [limit.add(fd, "10.0.0.2") for fd in (23, 24)] == [20, 21]
    limit.remove(22)
    limit.remove(22)
    assert limit.add(30, "10.0.0.3") is None
    assert len(limit) == 4
    assert limit.add(30, "10.0.0.4") is None  # the number was used again


@pytest.mark.parametrize("waiting", [2000])
def test_many_waiting_requests_cost_little_each(waiting):
    store = Store()
    for rank in range(waiting):
        store.send("wait", client=b"%d" % rank, keys=["go"], seconds=9.0)
    store.set(go=b"1")
    assert len(store.replies) == waiting + 1
