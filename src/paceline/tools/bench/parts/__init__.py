"""`paceline bench parts`: what the parts of a training step take, each by itself, for ``paceline plan step``.

Nothing here runs a step that is predicted. Measured are: the model's computing without any exchange (`computing`);
exchanges without any computing, alone and in a row (`exchanges`); and both together, so that it is known how much they
slow each other (`contention`). All ranks do the same at the same time, and times are those of the slowest rank.
"""
