"""A star over ZeroMQ: one hub that binds, any number of workers that connect to it, from wherever they are.

    hub = HubExchange("tcp://*:7000", "run", keys=HubKeys.read("keys"))
    worker = WorkerExchange("tcp://hub.example:7000", me=4711, keys=WorkerKeys.read("alice.key"))

An envelope travels as one message of three parts: head, payload and tail. `wire` is a socket and how it is set, `door`
says who may come in, `zeromq_end` is what both ends have in common, `zeromq_hub` and `zeromq_worker` are the ends.
"""

from __future__ import annotations

from paceline.transport.zmq.zmq_hub import HubExchange
from paceline.transport.zmq.zmq_socket import MAX_WORKER_NUMBER, SocketSettings
from paceline.transport.zmq.zmq_worker import WorkerExchange

__all__ = ["MAX_WORKER_NUMBER", "HubExchange", "SocketSettings", "WorkerExchange"]
