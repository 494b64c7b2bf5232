"""What a job would do elsewhere: real gradients in virtual time.

tasks.py        what is learnt: a small linear model, the reference GPT
asynchrony.py   hub and workers of a star, the very code that runs, on simulated clocks and links
lockstep.py     the same task and machines with gradients averaged at every step
"""
