"""A star in a storm: workers killed and stopped, links cut, the hub killed, messages damaged and repeated.

plan.py      what goes wrong when (pure)
spoil.py     an exchange that damages and repeats what it sends
task.py      what is learnt
worker.py    a worker, which notes what was acknowledged
hub.py       the hub, whose answers are spoilt too
run.py       plays a plan on the hosts of a lab, and counts afterwards
"""
