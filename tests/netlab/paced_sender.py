"""Sends through a hub at its share of the link; run on a host of the lab as `python paced_sender.py ROLE …`.

hub ADDRESS SECONDS SHARE LINK       send to every connected worker for SECONDS
worker ADDRESS SECONDS SHARE LINK    send to the hub for SECONDS

Both receive meanwhile. SHARE "-" sends heartbeats only. Prints the number of payload bytes received.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

from paceline.transport.envelope import Envelope
from paceline.transport.header_layout import Header
from paceline.transport.paced_queue import PacedQueue
from paceline.transport.token_bucket import make_token_bucket, max_frame_nbytes, parse_share
from paceline.transport.zmq import HubExchange, SocketSettings, WorkerExchange

BEAT_SECONDS = 0.2


def main():
    role, address, seconds, share, link = sys.argv[1:]
    rate = None if share == "-" else parse_share(share, float(link))
    settings = SocketSettings(rate=rate)
    if role == "hub":
        end = HubExchange(address, "run", insecure=True, settings=settings)
    else:
        end = WorkerExchange(address, 7, "run", settings=settings)
    paced = PacedQueue()
    if rate is not None and role == "hub":
        paced.limit(7, make_token_bucket(rate, time.monotonic()))  # as worker 7 requested
    elif rate is not None:
        paced.bucket = make_token_bucket(rate, time.monotonic())
    print(flow(end, paced, None if rate is None else os.urandom(max_frame_nbytes(rate)), float(seconds)))
    end.close()


def flow(end, paced, frame, seconds):
    """Send frames, or heartbeats, for some seconds, and return the received bytes."""
    sequence, received, beat_at, deadline, streams = (
        itertools.count(),
        0,
        0.0,
        time.monotonic() + seconds,
        set(),
    )

    def frames(target):
        while True:
            yield Envelope(Header("run", "frame", end.me, target, next(sequence)), frame)

    while (now := time.monotonic()) < deadline:
        for target in end.peers():
            if now >= beat_at:
                beat = Envelope(Header("run", "beat", end.me, target, next(sequence)))
                paced.add(target, iter([beat]), short=True)
                beat_at = now + BEAT_SECONDS
            if frame is not None and target not in streams:
                streams.add(target)
                paced.add(target, frames(target), short=False)
        wait = paced.pump(time.monotonic(), end.send)
        received += sum(len(each.payload) for each in end.poll(min(wait, 0.05)))
    assert not end.refused, end.refused
    return received


if __name__ == "__main__":
    main()
