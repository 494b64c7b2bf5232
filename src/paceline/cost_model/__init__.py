"""Cost model: measured profiles, fitted collectives, hardware rates, and the predicted time of a training step."""
