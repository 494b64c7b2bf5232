"""Diagnostics of a machine for training: hardware, limits, network and software, with remedies."""
