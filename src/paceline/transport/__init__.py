"""Checked messages between processes: envelopes, pacing, and transports over ZeroMQ, MPI and virtual time."""
