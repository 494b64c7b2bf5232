"""Exchanging messages that are checked at both ends: envelopes, and rings and all-to-alls of them over MPI."""
