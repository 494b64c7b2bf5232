"""Schedules carried out by real processes: priced beside measured."""
