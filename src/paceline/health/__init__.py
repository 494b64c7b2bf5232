"""Watchdog, attribution of failures, replica check and non-finite guard."""
