"""``paceline simulate``."""
