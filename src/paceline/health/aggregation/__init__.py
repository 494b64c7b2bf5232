"""Summaries of all ranks' heartbeats, collected up a tree of hosts and distributed down again."""
