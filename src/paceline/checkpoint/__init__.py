"""Checkpoints that are complete or absent at every instant, and restore a run exactly.

api.py                     what a program uses: `Checkpoint`
checkpoint_contents.py     collects the state of all objects, and restores it
named_objects.py           names of the models, optimizers and other objects
model_weights.py           collects weights, divided among ranks, and loads them
optimizer_state_pieces.py  optimizer state as pieces of flattened parameters
background_saver.py        writes a checkpoint during training
save_cadence.py            after which step one is due, and after which all ranks leave
save_on_warning.py         warnings that the machine is about to go
newest_checkpoint.py       finds the newest intact checkpoint, on all ranks together
weights_export.py          exports the weights to one safetensors file, and imports such files
format/                    files, manifest and folder
"""
