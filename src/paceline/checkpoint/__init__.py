"""Checkpoints that are complete or absent at every instant, and restore a run exactly.

api.py                     what a program uses: `Checkpoint`
checkpoint_contents.py     collects the state of all objects, and restores it
checkpoint_writer.py       writes the checkpoints of a run, one after another
background_saver.py        writes one during training
state_copies.py            copies of the state, part of which the writing thread makes
unchanged_files.py         files of frozen weights, which need not be written again
save_cadence.py            after which step one is due, and after which all ranks leave
save_on_warning.py         warnings that the machine is about to go
save_interval.py           how often one is worth its time
retention.py               which complete ones stay
newest_checkpoint.py       finds the newest intact checkpoint, on all ranks together
exclusive_use.py           lets one run, with all of its ranks, write to a place
parts/                     parts of tensors that ranks hold, by name: of models, optimizers and other objects
format/                    manifest and files of tensors: written and read, each byte verified
storage/                   places that hold checkpoints
interop/                   checkpoints and weights of other programs, read, written and converted
"""
