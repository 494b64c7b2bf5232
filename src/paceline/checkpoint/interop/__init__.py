"""Checkpoints and weights of other libraries: safetensors files as Hugging Face has them, and torch's DCP."""
