"""Parts of tensors that ranks hold, by name: what a checkpoint is collected from and restored to."""
