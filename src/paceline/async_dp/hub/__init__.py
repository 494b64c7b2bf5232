"""The hub: membership, screening, merging, recovery."""
