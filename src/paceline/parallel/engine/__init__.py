"""The gradient synchronisation engine: buckets, hooks, the launch queue, round status, weights."""
