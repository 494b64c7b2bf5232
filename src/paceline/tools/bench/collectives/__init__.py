"""`paceline bench collectives`: the time of collectives, by backend, number of ranks and size.

Method:

- *Processes.* One set of processes per number of ranks runs all backends that can share it; backends that need a
  launcher of their own get a set of their own. Each backend has a process group to itself.
- *A case* is an operation at a size. Its buffers are allocated once and first written before anything is timed.
- *Warm-up and check.* Every backend first runs on numbers that differ between positions and ranks, and every element
  of the result is checked; then it warms up; after the timed calls it is checked again.
- *Interleaving.* Backends take turns of a few calls each ([Note: turns] in `paceline.tools.bench.turn_statistics`).
  Garbage collection is off meanwhile.
- *An iteration* begins at a barrier of the backend itself (see [Note: start] in `collectives_worker`), is timed on
  every rank by a monotonic clock, and ends when the device has finished.
- *Numbers* are computed as described in [Note: one time per iteration] in `collectives_rows`.
"""
