"""A worker of asynchronous training: its session with the hub, and which updates it sends and takes."""
