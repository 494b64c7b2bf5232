"""Messages between hub and workers: layout, codec, framing, sending."""
