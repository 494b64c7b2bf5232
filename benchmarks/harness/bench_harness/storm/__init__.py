"""Fault injection for a hub and its workers: killed and stopped processes, cut links, corrupted messages.

fault_plan.py      which faults happen when (pure)
storm_program.py   the program of a hub or worker, which corrupts what it sends
storm_run.py       runs a plan on the hosts of a `Lab`, then compares the workers' logs with the hub's ledger
"""
