"""Data: who gets which samples, what that does to batches, and a loader that serves them exactly once."""
