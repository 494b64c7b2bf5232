"""Gradient compression: codecs, error feedback, PowerSGD, compressed all-reduce."""
