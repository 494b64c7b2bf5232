"""How much memory a training step takes: the life of every block, the ledger of the peak, whether it fits."""
