"""Gradient synchronisation: the plan, the buckets, the engine, the gate.

plan.py        Sync: how gradients are synchronised, a point in a plane
engine.py      DataParallel: what a user wraps a model in
reducer.py     the rounds of one bucketed engine, which serves every plan but full-shard
gradients.py   where gradients are while rounds come and go
bucket.py      which parameter lies where in which contiguous buffer
settle.py      building the buckets once, in the order in which gradients become ready
flight.py      buckets on their way: launched in one fixed order, waited for when they are needed
late.py        gradients that came after their bucket had left
ledger.py      what ranks tell one another at the end of a round: samples, used parameters, failures
weights.py     the factors that make a sum over ranks the mean over samples
gauge.py       is a gradient finite, and from which rank is what is not
finite.py      Finite: what becomes of a step whose gradient is not
clip.py        clipping by the norm of the whole gradient
wire.py        the collectives that the engine needs, over any process group
replica.py     the same parameters on every rank: verified, then broadcast
owned.py       is an optimizer one of this model
gate.py        nothing unsynchronised reaches optimizer.step()
shard.py       ShardedOptimizer: each rank updates 1/N and gathers the rest
full_shard.py  PyTorch FSDP2 behind the same surface
direct.py      FSDP2's collectives over the wire, where gloo's own are slow
compress.py    Compression: how numbers are made smaller before they are sent
codecs.py      float32 numbers to fewer bytes and back: raw, bf16, fp16, int8, int4
blockwise.py   what codecs of blocks share: places in a packet, chunks of work
dither.py      random bits for rounding that is right on average
sparse.py      TopK: only the largest numbers, and where they are
feedback.py    error feedback: what a codec loses is sent the next time
lowrank.py     PowerSGD's arithmetic: a matrix as the product of two thin ones
packets.py     a buffer summed over all ranks in packets of a codec
factored.py    a bucket of matrices summed as products of thin ones (PowerSGD)
freight.py     a bucket of gradients that travels compressed
leftovers.py   what compression still owes, over a restart
courier.py     a thread that does the second half of an exchange
periodic.py    LocalSGD, DiLoCo, SlowMo: parameters synchronised every H steps
outer_loop.py  counts local steps, sends and merges what is due
parting.py     may the ranks of a model part
staggering.py  which parameters are synchronised together, and when
fragment.py    one fragment: its shared parameters, and how they change
outer.py       the outer optimizers
level.py       one state of the inner optimizer for all ranks, after each had its own
timings.py     what one synchronised step cost
"""
