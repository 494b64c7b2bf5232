"""What the programs in benchmarks/ share: running ranks, comparing turns, filling tables."""
