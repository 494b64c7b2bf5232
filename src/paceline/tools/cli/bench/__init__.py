"""``paceline bench``: measuring commands."""
