"""Fault injection: killed and stopped processes, cut links, corrupted messages, ranks that fail.

fault_plan.py         random faults of the hosts of a hub and its workers (pure)
hub_program.py        process of a hub or worker, which corrupts what it sends
hub_run.py            applies a plan on the hosts of a `Lab`, then compares the workers' logs with the hub's ledger
watchdog_program.py   ranks that train until an injected fault, and write down which failure they reported
saved_training.py     training that saves checkpoints and logs the samples of its steps
disturbed_run.py      starts such a training, and waits for random moments of it
"""
