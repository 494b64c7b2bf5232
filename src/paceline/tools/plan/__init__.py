"""Planning before a run: memory, batch, strategy, data dispatch."""
