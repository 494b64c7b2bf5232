"""States that a checkpoint holds besides those of models and optimizers.

loader_states.py   states of loaders and other objects: whose are saved, which ranks load them, what is refused
loader_epochs.py   serves the epochs of a loader, and continues the one in which a checkpoint was saved
rank_digests.py    finds objects whose states differ between ranks though only rank 0's is saved
"""
