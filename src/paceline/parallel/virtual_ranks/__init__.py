"""Training with the same bits on any number of ranks: gradients of virtual ranks, summed along a fixed tree."""
