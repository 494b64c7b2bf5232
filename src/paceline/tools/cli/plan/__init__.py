"""``paceline plan`` and ``paceline dispatch``."""
