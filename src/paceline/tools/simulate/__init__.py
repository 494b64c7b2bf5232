"""What a job would do elsewhere: real gradients in virtual time, or numbers alone on very many nodes.

cluster/        a training on 1 to 100,000 nodes: step time, stragglers, failures, cost
tasks.py        what is learnt: a small linear model, the reference GPT
asynchrony.py   hub and workers of a star, the very code that runs, on simulated clocks and links
lockstep.py     the same task and machines with gradients averaged at every step
"""
