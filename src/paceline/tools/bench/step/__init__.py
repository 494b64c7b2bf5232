"""`paceline bench step`: the time of a training step, by strategy and bucket size."""
