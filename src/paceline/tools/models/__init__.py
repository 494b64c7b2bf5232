"""Reference workload: a GPT on bytes, and text that is on every machine."""
