"""Hub and workers over ZeroMQ: one hub binds, any number of workers connect from any host.

    hub = HubExchange("tcp://*:7000", "run", keys=HubKeys.read("keys"))
    worker = WorkerExchange("tcp://hub.example:7000", me=4711, keys=WorkerKeys.read("alice.key"))

An envelope is sent as one message of three parts: head, payload and tail.
"""

from __future__ import annotations

from paceline.transport.zmq.zmq_hub import HubExchange
from paceline.transport.zmq.zmq_socket import MAX_WORKER_NUMBER, SocketSettings
from paceline.transport.zmq.zmq_worker import WorkerExchange

__all__ = ["MAX_WORKER_NUMBER", "HubExchange", "SocketSettings", "WorkerExchange"]
