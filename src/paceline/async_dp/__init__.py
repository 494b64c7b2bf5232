"""Asynchronous data-parallel training over a hub: workers never wait, and the hub merges each update as it arrives.

api.py                   paceline.AsyncDataParallel, around a training loop
hub_client.py            connections of a worker to its hubs, and what it does after a step
optimizer_step_hooks.py  learning-rate scaling, and a call per step
comm_thread.py           one thread per hub
row_arithmetic.py        rows of float32, numpy or torch

worker/                  the training side: which step sends and which applies, sessions with hubs
hub/                     merging, screening, membership, recovery
protocol/                messages, framing, parameter layout, codecs
wal/                     write-ahead log of the hub, outbox of a worker
"""
