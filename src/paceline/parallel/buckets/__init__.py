"""Contiguous gradient buffers: where each gradient lies, how buckets are built, and what shards of them stand for."""
