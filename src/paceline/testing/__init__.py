"""Faults that are injected on purpose, and networks played by one machine."""
