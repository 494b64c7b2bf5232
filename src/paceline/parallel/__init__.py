"""Synchronous data-parallel training: `DataParallel`, its strategies and what they are made of.

data_parallel.py         `DataParallel`, which wraps the user's model
ddp.py                   `DistributedDataParallel`: torch's class over the same engine
ddp_reducer.py           stand-ins for the C++ objects behind torch's class
strategy.py              `Sync`: how gradients are synchronised, and the strategies by name
comm_hook.py             communication hooks: functions of the program that reduce a bucket
gradient_collectives.py  all-reduce, reduce-scatter and all-gather over any process group
two_axis_collectives.py  the same on a mesh whose first axis replicates and whose second shards
part_exchange.py         sums of parts that ranks send each other in pieces
replica_digests.py       digests of parameters, and which ranks' differ
engine/                  the reducer: hooks, buckets, launch queue, round status, step guard
sharding/                ZeRO (`ShardedOptimizer`) and PyTorch FSDP2
compression/             codecs, error feedback and PowerSGD for gradients on slow networks
local_sgd/               LocalSGD, DiLoCo, SlowMo: parameters synchronised every H steps
tuning/                  ``sync="auto"``: finds the fastest exact strategy during training
"""
