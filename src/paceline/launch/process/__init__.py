"""Rank processes on this machine: started, logged, ended."""
