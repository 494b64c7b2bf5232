"""Collectives as data: a schedule lists the messages of every round."""
