"""The process group of simulated accelerators."""
