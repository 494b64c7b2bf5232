"""A worker: its sessions with hubs, and which updates it sends and applies."""
