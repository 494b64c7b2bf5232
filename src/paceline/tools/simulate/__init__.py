"""Simulations: asynchronous training and DDP with real gradients in virtual time, and analytic models of clusters.

cluster/               training on 1 to 1,000,000 nodes: step time, stragglers, failures, cost
learning_tasks.py      tasks: a small linear model, the reference GPT
async_settings.py      settings of an asynchronous run
simulated_machines.py  speeds and links of machines, and when they leave and return
async_simulation.py    the production code of hub and workers on simulated clocks and links
simulated_worker.py    a worker in virtual time
async_sweep.py         one schedule after another, DDP first
async_results.py       loss curves, and a row per schedule
simulated_ddp.py       the same tasks and machines with gradients averaged at every step
"""
