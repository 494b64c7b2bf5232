"""Parts of the state of a run, by name: what a checkpoint is collected from and restored to.

boxes.py                   the rectangular regions of tensors that ranks hold
state_parts.py             named tensors, of which each rank has parts, and plain values
state_reader.py            what is read of a checkpoint, whichever format it has
named_objects.py           names of the models, optimizers and other objects
model_weights.py           collects weights, divided among ranks, and loads them
optimizer_parts.py         optimizer state as named tensors
optimizer_restore.py       what each rank reads of it
optimizer_state_pieces.py  optimizer state as pieces of flattened parameters, between ranks
loader_states.py           states of loaders and other objects: whose are saved, which ranks load them, what is refused
loader_epochs.py           serves the epochs of a loader, and continues the one in which a checkpoint was saved
rank_digests.py            finds objects whose states differ between ranks though only rank 0's is saved
dcp_names.py               names in checkpoints of torch.distributed.checkpoint
"""
