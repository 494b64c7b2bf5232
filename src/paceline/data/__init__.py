"""Data loading that assigns each sample to one rank, with exact resume and policies for uneven data."""
