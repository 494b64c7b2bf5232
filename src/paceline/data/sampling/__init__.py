"""Which rank gets which samples: blocks, shares, uneven ends, shuffling."""
