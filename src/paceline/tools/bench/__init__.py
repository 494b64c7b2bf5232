"""Measurements: contestants take turns in the same processes, and every number says how it was obtained."""
