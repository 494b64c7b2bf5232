"""The elastic agent of one host: rendezvous, restarts, the outcome of a run."""
