"""Benchmarks: interleaved measurements in the same processes; results record how every number was obtained."""
