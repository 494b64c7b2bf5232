"""Checkpoints that are complete or absent at every instant, and restore a run exactly.

api.py                what a program uses: `Checkpoint`
contents.py           collects the state of all objects, and restores it; model_weights.py, optimizer_state.py
background_saver.py   writes a checkpoint during training; save_cadence.py: when one is due
resume.py             finds the newest intact checkpoint, on all ranks together
format/               files, manifest and folder
"""
