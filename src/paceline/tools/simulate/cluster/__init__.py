"""Analytic model of training on 1 to 1,000,000 nodes: step time, stragglers, failures, cost.

all_reduce_rounds.py      messages of all-reduce algorithms, as arrays
cluster_network.py        time of an all-reduce on described or measured networks
exposed_communication.py  communication not hidden by computing
compute_times.py          step times of uneven machines with jitter
failure_cost.py           checkpoints, failures, the best checkpoint interval, recovery by restart
live_recovery.py          what failures cost if survivors go on, and how often that is not possible
live_jobs.py              jobs with live recovery, failure by failure
cluster_plan.py           settings of a training
cluster_simulation.py     one or many numbers of nodes
cluster_text.py           the result in sentences
"""
