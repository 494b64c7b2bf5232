"""`paceline bench collectives`: what collectives take, by backend, number of ranks and size.

Method:

- *Processes.* For each number of ranks one set of processes is started, in which all backends live that can; those
  that need a launcher of their own get a set of their own. Each backend has a process group to itself.
- *A case* is an operation at a size. Its buffers are allocated once and first written before anything is timed.
- *Warm-up and check.* Every backend first computes on numbers that tell places and ranks apart, and every element is
  looked at; then it warms up; after the timed calls it is checked once more.
- *Turns.* Backends take turns (A B, B A, …; `paceline.tools.bench.turn_order`), a few calls each, so that whatever
else the
  machine does meets all of them. Collection of garbage waits meanwhile.
- *An iteration* begins at a barrier of the backend itself (see [Note: start] in `timing`), is timed on every rank by a
  clock that can't jump, and ends when the device has done what it was given.
- *Numbers* are made as [Note: one time per iteration] in `rows` says.

`operations` defines sizes and bandwidths, `settings` what can be asked for, `plan` what is measured when, `memory` what
fits, `worker` what each rank runs, `journal` what is kept if it ends early, `results` what is written.
"""
