"""The loop behind ``paceline train``: the reference GPT, trained data-parallel on text.

settings.py     what was asked for; every bad value is refused here, before anything starts
folder.py       the run folder: what is in it, and when it may be written
start.py        start the ranks, or take part where a launcher started this process
worker.py       the program that each rank runs
job.py          what a rank holds: data, model, optimizer
loop.py         the loop
apart.py        local steps, and parameters synchronised every so many of them
auto.py         what fits the network, measured and chosen at the start
traffic.py      what was sent, beside what it would have been
schedule.py     learning rate by step
evaluate.py     held-out loss, exact over all ranks
progress.py     what rank 0 prints meanwhile
snapshot.py     which checkpoint there is, and whether it fits
"""
