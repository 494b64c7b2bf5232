"""A run's record: what ran, each rank's timeline on one clock, the numbers of its steps. `paceline report` reads it.

record.py    the user's side: around the loop
timeline.py  what each rank does and when, on one clock
    clocks.py    how far the clocks of hosts are apart
facts.py     what ran, and on what
scalars.py   the numbers of steps, for TensorBoard too
"""
