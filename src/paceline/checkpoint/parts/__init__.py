"""What a checkpoint holds: weights, optimizer state, random number generators, and how each is taken and restored."""
