"""Comparison of two runs on one page."""
