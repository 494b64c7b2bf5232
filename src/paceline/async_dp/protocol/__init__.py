"""Messages between hub and workers: contents, framing, parameter layout and codecs."""
