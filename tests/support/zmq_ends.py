"""Hub and workers over ZeroMQ for tests: polled together in one thread, or run as a program.

python zmq_ends.py hub ADDRESS [KEYS]       run a hub that echoes every message; print its address
python zmq_ends.py invalid ADDRESS COUNT    send messages that a hub has to reject, of every kind; print how many
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import zmq

import paceline
from paceline.transport.envelope import Envelope, encode
from paceline.transport.header_layout import Header
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq import HubExchange
from paceline.transport.zmq.curve_keys import HubKeys

LOOPBACK = "tcp://127.0.0.1:*"
ENOUGH = 30.0
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(paceline.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}


def make(source, target, sequence=0, payload=b"", *, run="run", kind="frame", **changes):
    return Envelope(Header(run, kind, source, target, sequence, **changes), payload)


def wire_parts(envelope):
    """Return an envelope as the parts that it travels in."""
    return [bytes(part) for part in encode(envelope.header, envelope.payload)]


def drive(ends, until, seconds=ENOUGH):
    """Poll the ends in turn until a condition holds, and return the messages received by each."""
    received = [[] for _ in ends]
    deadline = time.monotonic() + seconds
    while not until(received):
        assert time.monotonic() < deadline, [(end.refused, getattr(end, "problem", "")) for end in ends]
        for mine, end in zip(received, ends, strict=True):
            mine += end.poll(0.002)
    return received


def poll_for(ends, seconds):
    """Poll the ends in turn for a while, and return the messages received by each."""
    deadline = time.monotonic() + seconds
    return drive(ends, lambda _: time.monotonic() >= deadline)


def connect_all(hub, *workers):
    """Connect workers; return once the hub has received a message of each."""
    drive([hub, *workers], lambda _: all(worker.peers() for worker in workers))
    for worker in workers:
        assert worker.send(make(worker.me, HUB))
    return drive([hub, *workers], lambda _: {worker.me for worker in workers} <= set(hub.peers()))[0]


def read_address(process):
    """Return the address of a hub that was started as a program."""
    return process.stdout.readline().strip()


def port_of(address):
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def program(*arguments):
    """Run this file, as long as a with-statement lasts."""
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def echo(address, keys=""):
    hub = HubExchange(address, "run", keys=HubKeys.read(keys) if keys else None, insecure=not keys)
    print(hub.address, flush=True)
    while True:
        for received in hub.poll(1.0):
            back = replace(received.header, source=HUB, target=received.header.source)
            hub.send(Envelope(back, received.payload))


# --- ZMTP 3.0 by hand, RFC 23: frames that libzmq itself does not send


def greeting(mechanism=b"NULL"):
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body, *, more=False, command=False, size=None):
    size = len(body) if size is None else size
    flags = more | command << 2
    if size > 255:
        return bytes([flags | 2]) + struct.pack(">Q", size) + body
    return bytes([flags, size]) + body


def ready(identity):
    def entry(name, value):
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    body = b"\x05READY" + entry(b"Socket-Type", b"DEALER") + entry(b"Identity", identity)
    return frame(body, command=True)


def handshake(raw, identity, look=lambda: None):
    """Become a peer over a TCP connection; `look` is called until the hub has answered."""
    raw.sendall(greeting() + ready(identity))
    raw.settimeout(0.02)
    answer, deadline = b"", time.monotonic() + ENOUGH
    while len(answer) < 66 or len(answer) < 66 + answer[65]:
        assert time.monotonic() < deadline
        look()
        with contextlib.suppress(TimeoutError):
            answer += raw.recv(66 + 255 - len(answer))
    raw.settimeout(ENOUGH)


# --- clients that send invalid messages


def bad_messages(draw, me):
    """Yield messages, part by part, that a hub has to reject from worker `me`."""
    good = [bytes(part) for part in encode(Header("run", "frame", me, HUB, 5), draw.randbytes(300))]
    head, payload, tail = good
    at = draw.randrange(len(head))
    yield [draw.randbytes(draw.randrange(100)) for _ in range(draw.randrange(1, 6))]
    yield [head[:at] + bytes([head[at] ^ 1 << draw.randrange(8)]) + head[at + 1 :], payload, tail]
    yield [head, payload[: draw.randrange(len(payload))], tail]
    yield [head, payload, tail[: draw.randrange(len(tail))]]
    yield [head, payload + b"x", tail]
    yield [head + payload + tail]
    yield [head, payload, tail, b""]
    yield [b"", head, payload, tail]
    yield [*good, *good]
    yield [tail, payload, head]
    yield [b""] * 200
    yield [head, payload]
    yield [bytes(part) for part in encode(Header("another", "frame", me, HUB, 5))]
    yield [bytes(part) for part in encode(Header("run", "frame", me, 9, 5))]
    yield [bytes(part) for part in encode(Header("run", "frame", me + 1, HUB, 5))]
    yield [bytes(part) for part in encode(Header("run", "frame", HUB, HUB, 5))]


def send_invalid_messages(address, count):
    """Send `count` bad messages by sockets of libzmq, and as many bytes of garbage as hands can make."""
    context, draw, sent = zmq.Context(), random.Random(3), 0
    identities = [b"a worker", b"", b"short", b"x" * 255, b"\x01" * 8, bytes(8)]
    dealers = []
    for identity in identities:
        dealer = context.socket(zmq.DEALER)
        if identity:
            dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.linger = 5000
        dealer.connect(address)
        dealers.append(dealer)
    while sent < count:
        for parts in bad_messages(draw, 2**40):
            draw.choice(dealers).send_multipart(parts)
            sent += 1
        if draw.random() < 0.3:
            garbage(address, draw)
    for dealer in dealers:
        dealer.close()
    context.term()
    print(sent, flush=True)


def garbage(address, draw, look=lambda: None):
    """Send garbage over TCP, from random bytes to almost valid messages."""
    good = b"".join(frame(part, more=index < 2) for index, part in enumerate(wire_parts(make(77, HUB))))
    begins = [b"", b"GET / HTTP/1.1\r\n\r\n", greeting(), greeting(b"CURVE"), greeting() + ready(b"x" * 300)]
    follow = [
        b"",
        frame(b"x", size=2**62),
        frame(b"x", size=(4 << 20) + 1000),
        frame(b"\x04PING" + bytes(400), command=True),
        good[: draw.randrange(len(good))],
    ]
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port_of(address)), 5.0) as raw:
        if draw.random() < 0.5:
            raw.sendall(draw.choice(begins))
        else:
            handshake(raw, b"", look)
            raw.sendall(draw.choice(follow))
        raw.sendall(draw.randbytes(draw.randrange(2000)))
        if draw.random() < 0.5:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with RST


if __name__ == "__main__":
    what, where, *more_arguments = sys.argv[1:]
    if what == "hub":
        echo(where, *more_arguments)
    else:
        send_invalid_messages(where, int(more_arguments[0]))
