"""Failover of a hub: a standby that has a copy of its folder, or shares it, takes over when it is gone."""
