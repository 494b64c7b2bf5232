"""The hub of asynchronous training: membership, screening, merging, recovery."""
