"""Sharded training: ZeRO optimizers, FSDP2, resharding of optimizer state."""
