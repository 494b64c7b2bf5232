"""Gradient synchronisation: the plan, the buckets, the engine, the gate.

plan.py        Sync: how gradients are synchronised, a point in a plane
engine.py      DataParallel: what a user wraps a model in
reducer.py     the rounds of one bucketed engine, which serves every plan but full-shard
bucket.py      which parameter lies where in which contiguous buffer
ledger.py      what ranks tell one another at the end of a round: samples, used parameters, failures
wire.py        the three collectives that the engine needs, over any process group
replica.py     the same parameters on every rank: verified, then broadcast
gate.py        nothing unsynchronised reaches optimizer.step()
shard.py       ShardedOptimizer: each rank updates 1/N and gathers the rest
full_shard.py  PyTorch FSDP2 behind the same surface
"""
