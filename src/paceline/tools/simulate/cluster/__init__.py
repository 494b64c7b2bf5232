"""A training on 1 to 100,000 nodes, in numbers: step time, stragglers, failures, cost.

rounds.py     what an all-reduce sends, as arrays
network.py    links between nodes and inside them, and what an algorithm costs on them
fitted.py     the same out of a measured profile, with its error
overlap.py    what of communication computing does not hide
machines.py   how long ranks compute: machines that differ, steps that vary
failures.py   checkpoints, failures, the best interval
plan.py       what is simulated
run.py        one number of nodes, or many
"""
