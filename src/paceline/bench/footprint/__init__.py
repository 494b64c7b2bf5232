"""The memory of a training step, predicted without running it and measured by running it, from one description.

setting.py    strategy, ranks, optimizer, precision: plain values
subject.py    what is trained: a reference size, or whatever the user's code builds
training.py   the loop that both ways run
predict.py    runs it on tensors without memory, among ranks that are not there
measure.py    has real ranks run it
worker.py     what each of them runs
allocated.py  what torch's allocator says of a block of code
"""
