"""`paceline bench parts`: the parts of a training step, measured separately for ``paceline plan step``.

No step that is predicted is run. Measured are the model's computing without communication (`model_compute_times`);
exchanges without computing, alone and queued (`exchange_times`); and both at once, to know how much they slow each
other (`contention`). All ranks do the same at the same time, and times are those of the slowest rank.
"""
