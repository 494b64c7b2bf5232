"""Sends bytes between hosts of the lab and times them: run on a host as `python blast.py ROLE …`.

receive PORT                  take what one client sends; prints JSON: nbytes, seconds
send ADDRESS PORT NBYTES      send so much
reach ADDRESS PORT SECONDS    exit with 0 if a connection succeeds within the time, else with 1
"""

from __future__ import annotations

import json
import socket
import sys
import time

CHUNK = 1 << 16


def receive(port):
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
    first = nbytes = 0
    start = last = 0.0
    with connection:
        while piece := connection.recv(CHUNK):
            last = time.perf_counter()
            if not nbytes:
                first, start = len(piece), last  # the first piece was sent before
            nbytes += len(piece)
    print(json.dumps({"nbytes": nbytes, "timed_nbytes": nbytes - first, "seconds": last - start}))


def send(address, port, nbytes):
    with connect(address, port, 10.0) as connection:
        piece = bytes(CHUNK)
        for start in range(0, nbytes, CHUNK):
            connection.sendall(piece[: nbytes - start])


def reach(address, port, seconds):
    try:
        connect(address, port, seconds).close()
    except OSError:
        sys.exit(1)


def connect(address, port, seconds):
    """Connect to a server that may not be there yet, or not be reachable yet."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((address, port), timeout=max(0.01, left))
        except OSError:
            if left <= 0.02:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "receive":
        receive(int(words[0]))
    elif role == "send":
        send(words[0], int(words[1]), int(words[2]))
    else:
        reach(words[0], int(words[1]), float(words[2]))
