"""``paceline launch``."""
