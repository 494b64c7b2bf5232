"""Processes: how they are started, warned, requested to leave and ended, and what their exit codes mean."""
