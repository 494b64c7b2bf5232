"""Files of a checkpoint: folder, manifest, tensors, state trees."""
