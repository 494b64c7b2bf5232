"""The reference workload: a GPT on bytes, with text that is on every machine."""
