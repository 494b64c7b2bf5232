"""Nothing lost: checkpoints that are whole at every instant, and what is known of ranks that fail.

Checkpoints:

    store.py         `Checkpoint`: what a program sees
    contents.py      what is in one, and how it is taken up: weights.py, pieces.py (optimizers), random_state.py
    subjects.py      what it is of: models, optimizers, others, by name
    tree.py          any state_dict as JSON, its tensors aside
    tensors.py       tensors to a safetensors file, a checksum each; reading.py: and back
    manifest.py      the page that says what belongs to a checkpoint; everything read from it is checked
    folder.py        the folder of a run's checkpoints: which are there, the lock, what is removed
    saving.py        writes one while training goes on; cadence.py: when that is due
    recovery.py      the newest intact one, found by all ranks together

Ranks: watch.py (`Watch`; its docstring maps the other files), drift.py and digest.py (`Drift`).
"""
