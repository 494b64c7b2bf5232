"""Collectives as data: a schedule says who sends which part to whom in which round."""
