"""Ranks of test_hub_over_mpi.py: ``python hub_over_mpi_ranks.py CASE``."""

from __future__ import annotations

import random
import sys
import threading
import time

from hub_over_mpi import MpiExchange
from mpi_worlds import report
from paceline.errors import EnvelopeError, UsageError
from paceline.transport.envelope import check_route, decode_envelope
from paceline.transport.mpi_exchange.message_carrier import MessageTag, MpiCarrier
from paceline.transport.transport_interface import HUB
from zmq_ends import bad_messages, make

SIZES = (0, 1, 5000, 100_000, 4 << 20)
ENOUGH = 30.0


def until(so):
    """Wait until something is so."""
    deadline = time.monotonic() + ENOUGH
    while not so():
        assert time.monotonic() < deadline


def payload(source, sequence):
    return bytes([source + sequence % 50]) * SIZES[sequence % len(SIZES)]


def many_messages(carrier, end):
    """All workers send a lot, and the hub sends all of it back."""
    many, received = 60, []
    others = list(range(1, carrier.size)) if end.me == HUB else [HUB]
    assert list(end.peers()) == others
    if end.me == HUB:
        while len(received) < many * len(others):
            for each in end.poll(1.0):
                received.append((each.header.source, each.header.sequence))
                back = make(HUB, each.header.source, each.header.sequence, each.payload)
                until(lambda back=back: end.send(back))
        for source in others:
            assert [sequence for sender, sequence in received if sender == source] == list(range(many))
    else:
        sequence = 0
        while len(received) < many:
            if sequence < many and end.send(make(end.me, HUB, sequence, payload(end.me, sequence))):
                sequence += 1
            for each in end.poll():
                assert bytes(each.payload) == payload(end.me, each.header.sequence)
                received.append(each.header.sequence)
        assert received == list(range(many))
        assert end.sent_nbytes == end.received_nbytes
    assert not end.send(make(end.me, 99)), "there is no such rank"
    assert not end.send(make(end.me, end.me))
    return len(received)


def is_good(message, source):
    try:
        header = decode_envelope(message, limit=SIZES[-1]).header
        check_route(header, me=HUB, run="run", carried_from=source)
    except EnvelopeError:
        return False
    return True


def invalid_messages(carrier, end):
    """Workers send invalid messages, and sometimes an envelope."""
    if end.me == HUB:
        received = []
        while len(received) < 3 * (carrier.size - 1):
            received += end.poll(1.0)
        assert all(each.header.kind == "good" for each in received)
        return dict(end.refused)
    requests, sent = [], 0
    for number in range(3):
        for parts in bad_messages(random.Random(number), end.me):
            message = b"".join(parts)  # here a message has one part
            if is_good(message, end.me):
                message += b"x"
            requests.append((carrier.send(message, HUB, MessageTag.ENVELOPE), message))
            sent += 1
        long = bytes(5 << 20)
        requests.append((carrier.send(long, HUB, MessageTag.ENVELOPE), long))
        sent += 1
        until(lambda number=number: end.send(make(end.me, HUB, number, kind="good")))
    until(lambda: all(request.Test() for request, _ in requests))
    return sent


def slow_hub(carrier, end):
    """The hub does not poll for a while: `send` reports that to workers."""
    if end.me == HUB:
        time.sleep(0.3)
        received = []
        deadline = time.monotonic() + ENOUGH
        while sum(each.header.kind == "last" for each in received) < carrier.size - 1:
            assert time.monotonic() < deadline
            received += end.poll(0.1)
        return len(received)
    taken = 0
    while end.send(make(end.me, HUB, taken, bytes(1 << 20))):
        taken += 1
        assert taken < 100
    until(lambda: end.send(make(end.me, HUB, taken, kind="last")))
    return taken + 1


def woken(carrier, end):
    """Another thread ends the wait."""
    end.wake()
    assert end.poll(3600.0) == []
    timer = threading.Timer(0.05, end.wake)
    timer.start()
    assert end.poll(3600.0) == []
    timer.join()
    for wrong in (make(9, HUB), make(end.me, (end.me + 1) % carrier.size, 0, bytes((4 << 20) + 1))):
        try:
            end.send(wrong)
        except UsageError:
            continue
        raise AssertionError(wrong)
    return 1


def leave(carrier, end):
    """All ranks leave at once, with many pending messages that no rank receives."""
    for target in end.peers():
        for sequence in range(3):
            assert end.send(make(end.me, target, sequence, bytes(4 << 20)))
    return 1


def main():
    carrier = MpiCarrier()
    end = MpiExchange(carrier, "run")
    what = globals()[sys.argv[1]](carrier, end)
    end.close()
    report(carrier.rank, what)


if __name__ == "__main__":
    main()
