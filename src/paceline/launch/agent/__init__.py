"""Elastic agent of one host: rendezvous, restarts and the outcome of a job."""
