"""Sends a file over TCP as fast as it goes, or receives one and prints the bytes per second that came.

python benchmarks/star/transfer.py receive PORT
python benchmarks/star/transfer.py send HOST:PORT SECONDS
"""

from __future__ import annotations

import socket
import sys
import time


def receive(port: str) -> None:
    """Take one connection until it ends."""
    with socket.create_server(("0.0.0.0", int(port))) as server:
        connection, _ = server.accept()
        with connection:
            began, came = time.monotonic(), 0
            while data := connection.recv(1 << 20):
                came += len(data)
            print(came / (time.monotonic() - began))


def send(address: str, seconds: str) -> None:
    """Send for so long."""
    host, _, port = address.rpartition(":")
    block, until = bytes(1 << 18), time.monotonic() + float(seconds)
    with socket.create_connection((host, int(port))) as connection:
        while time.monotonic() < until:
            connection.sendall(block)


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
